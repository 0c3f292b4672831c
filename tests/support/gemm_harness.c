/* gemm.c alone, for CPUs that are emulated: random shapes, compared with float64, and each row with itself alone.

   Prints for each dtype a hash of all outputs. */

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define TILE_N 32
#define RUNS 40

void gemm_f32(const float *, const float *, const float *, float *, int64_t m, int64_t k, int64_t n, int64_t threads);
void gemm_bf16(
    const uint16_t *, const uint16_t *, const uint16_t *, uint16_t *, int64_t m, int64_t k, int64_t n, int64_t threads
);

static uint64_t state = 1;

static int64_t draw(int64_t from, int64_t to) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return from + (int64_t)((state >> 33) % (uint64_t)(to - from + 1));
}

/* A dtype: its elements are read and written as float by these. */
typedef struct {
    const char *name;
    size_t size;
    int64_t pair, largest; /* integer that it represents, as it does all smaller ones */
    double tolerance;
} dtype;

static const dtype FLOAT32 = {"f32", 4, 1, (1 << 24) - 1, 1e-5}, BFLOAT16 = {"bf16", 2, 2, 255, 1e-2};

static float get(const dtype *type, const void *array, int64_t i) {
    uint32_t bits = type->size == 4 ? ((const uint32_t *)array)[i] : (uint32_t)((const uint16_t *)array)[i] << 16;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* Only what the dtype represents. */
static void set(const dtype *type, void *array, int64_t i, float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    if (type->size == 4) ((uint32_t *)array)[i] = bits;
    else ((uint16_t *)array)[i] = bits >> 16;
}

static void *random_array(const dtype *type, int64_t length) {
    void *array = calloc(length, type->size);
    for (int64_t i = 0; i < length; i++) {
        const float integer = draw(-type->largest, type->largest);
        set(type, array, i, ldexpf(integer, draw(-16, -8)));
    }
    return array;
}

static void *pack(const dtype *type, const void *weight, int64_t k, int64_t n) {
    const int64_t tiles = (n + TILE_N - 1) / TILE_N;
    void *packed = calloc(tiles * TILE_N * k, type->size);
    for (int64_t column = 0; column < n; column++)
        for (int64_t i = 0; i < k; i++) {
            const int64_t pair = column / TILE_N * (k / type->pair) + i / type->pair;
            set(type, packed, (pair * TILE_N + column % TILE_N) * type->pair + i % type->pair, get(type, weight, column * k + i));
        }
    return packed;
}

static void gemm(const dtype *type, const void *x, const void *w, const void *bias, void *y, int64_t m, int64_t k, int64_t n) {
    if (type->size == 4) gemm_f32(x, w, bias, y, m, k, n, 1);
    else gemm_bf16(x, w, bias, y, m, k, n, 1);
}

static void check(const dtype *type, int ok, const char *what, int64_t m, int64_t k, int64_t n) {
    if (ok) return;
    printf("%s: %s, m %d k %d n %d\n", type->name, what, (int)m, (int)k, (int)n);
    exit(1);
}

static uint64_t run(const dtype *type, uint64_t hash) {
    const int64_t m = draw(1, 70), k = type->pair * draw(1, 350), n = draw(1, 150);
    void *x = random_array(type, m * k), *weight = random_array(type, n * k), *packed = pack(type, weight, k, n);
    void *bias = draw(0, 1) ? random_array(type, n) : NULL, *y = malloc(m * n * type->size), *alone = malloc(n * type->size);
    gemm(type, x, packed, bias, y, m, k, n);
    for (int64_t row = 0; row < m; row++) {
        gemm(type, (char *)x + row * k * type->size, packed, bias, alone, 1, k, n);
        check(type, !memcmp(alone, (char *)y + row * n * type->size, n * type->size), "a row depends on others", m, k, n);
        for (int64_t column = 0; column < n; column++) {
            double sum = bias ? get(type, bias, column) : 0, size = fabs(sum) + 1;
            for (int64_t i = 0; i < k; i++) {
                const double product = (double)get(type, x, row * k + i) * get(type, weight, column * k + i);
                sum += product, size += fabs(product);
            }
            check(type, fabs(get(type, y, row * n + column) - sum) <= type->tolerance * size, "wrong", m, k, n);
        }
    }
    for (size_t i = 0; i < m * n * type->size; i++) hash = (hash ^ ((unsigned char *)y)[i]) * 1099511628211u;
    free(x), free(weight), free(packed), free(bias), free(y), free(alone);
    return hash;
}

int main(void) {
    const dtype *types[] = {&FLOAT32, &BFLOAT16};
    for (int i = 0; i < 2; i++) {
        uint64_t hash = 14695981039346656037u;
        for (int j = 0; j < RUNS; j++) hash = run(types[i], hash);
        printf("%s %016llx\n", types[i]->name, (unsigned long long)hash);
    }
}
