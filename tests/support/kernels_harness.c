/* Kernels of one dtype with random inputs, for CPUs that are emulated. Prints for each a hash of all outputs. */

#include <stdio.h>
#include <stdlib.h>

#include "attention_args.h"
#include "codes.h"
#include "recurrent.h"

#define MAX_ROWS 19
#define INPUTS 160
#define OUTPUTS 70
#define SIZE (1 << 19) /* of buffers */

typedef struct {
    const scalar_t *weight, *bias;
    int64_t size, is_centered;
    float weight_offset, eps;
} norm_params;

typedef struct {
    const scalar_t *x;
    scalar_t *y;
    int64_t heads, head_size, x_strides[3], y_strides[3];
} rotary_tensor;

#define GEMM(weight_type) \
    (const scalar_t *, const weight_type *, const scalar_t *, scalar_t *, int64_t m, int64_t k, int64_t n, int64_t threads)
void EXPORT(gemm) GEMM(void);
void EXPORT(gemm_by_bf16) GEMM(void);
void EXPORT(gemm_by_f16) GEMM(void);
void EXPORT(dequantizing_gemm) GEMM(packed_codes);
int EXPORT(quantized_gemm) GEMM(packed_codes);
int EXPORT(paged_attention)(const attention_args *);
void EXPORT(norm)(const norm_params *, const scalar_t *, scalar_t *, int64_t, int64_t, int64_t, int64_t, int64_t);
void EXPORT(activation)(const scalar_t *, const scalar_t *, scalar_t *, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t);
void EXPORT(rotary_embedding)(
    const rotary_tensor *, const rotary_tensor *, const scalar_t *, const scalar_t *, int64_t, int64_t, int64_t, int64_t, int64_t
);
void EXPORT(causal_conv)(const conv_args *);
void EXPORT(gated_delta_rule)(const delta_args *);
void EXPORT(selective_scan)(const scan_args *);

static float floats[SIZE];       /* in [-4, 4) */
static scalar_t x[SIZE], y[SIZE]; /* x: the same */
static uint16_t halves[SIZE];    /* float16, denormal ones among them */
static uint64_t hash = 1;

static void draw_inputs(void) {
    uint64_t state = 1;
    for (int64_t i = 0; i < SIZE; i++) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        floats[i] = ldexpf((int32_t)(state >> 40) - (1 << 23), -21);
        halves[i] = state >> 33 & 0xbfff;
        store_partial(x + i, broadcast(floats[i]), 1);
    }
}

static void add(int64_t count) {
    for (size_t i = 0; i < count * sizeof *y; i++) hash = (hash ^ ((const uint8_t *)y)[i]) * 1099511628211u;
}

static void print(const char *name) {
    printf("%s %016llx\n", name, (unsigned long long)hash);
    hash = 1;
}

#define MULTIPLY(name, weight)                                                                               \
    for (int64_t m = 1; m <= MAX_ROWS; m += 3)                                                               \
        EXPORT(name)(x, weight, x + SIZE / 2, y, m, INPUTS, OUTPUTS, 2), add(m * OUTPUTS);                   \
    print(#name);

static void multiply(void) {
    MULTIPLY(gemm, x)
#if !BF16
    MULTIPLY(gemm_by_bf16, halves)
    MULTIPLY(gemm_by_f16, halves)
#endif
}

/* With each kind of weight and of quantized x. */
static void multiply_codes(int quantizes, int last_kind) {
    for (int64_t m = 1; m <= MAX_ROWS; m += 3)
        for (int64_t size = HALF_BLOCK; size <= 16 * HALF_BLOCK; size *= 2)
            for (int64_t way = 0; way < 16; way++)
                for (int64_t kind = INT4; kind <= last_kind; kind++) {
                    const int64_t k = INPUTS - 5 * quantizes, group_size = min_i64(size, INPUTS);
                    const packed_codes weight = {
                        (const uint8_t *)floats, floats, kind, group_size, (INPUTS + group_size - 1) / group_size, way & 1, 0,
                        way / 2 % 2, way & 4 ? 127.5f : 127, way & 8 ? 0.02f : 0
                    };
                    if (quantizes) EXPORT(quantized_gemm)(x, &weight, x, y, m, k, OUTPUTS, 2);
                    else EXPORT(dequantizing_gemm)(x, &weight, x, y, m, k, OUTPUTS, 2);
                    add(m * OUTPUTS);
                }
    print(quantizes ? "quantized_gemm" : "dequantizing_gemm");
}

/* A decode and a chunk of a prompt; blocks of 32 tokens. */
static void attend(void) {
    int64_t blocks[16];
    for (int64_t i = 0; i < 16; i++) blocks[i] = i * 7 % 16;
    const sequence sequences[] = {{0, 1, 501, blocks}, {1, 9, 150, blocks + 3}};
    for (int64_t way = 0; way < 16; way++) {
        const char *cache = way / 8 ? (char *)floats : (char *)x;
        const attention_args args = {
            .q = x + 99, .k_cache = cache, .v_cache = cache + sizeof x / 2, .output = y, .sequences = sequences,
            .sinks = way & 1 ? floats : NULL, .num_seqs = 2, .q_token_stride = 4 * 64, .q_head_stride = 64, .k_size = 64,
            .v_size = 64, .kv_heads = 2, .group = 2, .block_size = 32, .window = way & 2 ? 77 : 1000, .scale = 0.1f,
            .softcap = way & 4 ? 30 : 0, .is_coded = way / 8, .causal = 1, .threads = 2
        };
        EXPORT(paged_attention)(&args), add(10 * 4 * 64);
    }
    print("paged_attention");
}

static void compute_elements(void) {
    for (int64_t size = 1; size < 200; size += 37) {
        for (int64_t centered = 0; centered < 2; centered++) {
            const norm_params norm = {x + 7, centered ? x + 300 : NULL, size, centered, 1 - centered, 1e-5f};
            EXPORT(norm)(&norm, x, y, MAX_ROWS, 1, size, size, 2), add(MAX_ROWS * size);
        }
        for (int64_t kind = 0; kind < 6; kind++)
            EXPORT(activation)(x, x + 50, y, MAX_ROWS, size, size, size, kind, 2), add(MAX_ROWS * size);
    }
    const rotary_tensor tensor = {x, y, 3, 72, {0, 72, 216}, {0, 72, 216}};
    EXPORT(rotary_embedding)(&tensor, &tensor, x + 9, x + 3000, 1, MAX_ROWS, 64, 0, 2), add(MAX_ROWS * 216);
    print("elements");
}

/* A sequence that begins, and one that goes on and whose state is saved after its first token. */
static void recur(void) {
    static float states[SIZE / 4];
    const token_slots slots[] = {{-1, 1, -1}, {-1, 1, -1}, {-1, 1, -1}, {0, 2, 3}, {0, 2, -1}};
    const flat_batch batch = {y, states, slots, 5, 2};
    const strided none = {NULL}, decays = {floats + 5, {0, 4, 1}, 1}, heads = {x + 7, {4 * 37, 37, 1}, 0};
    const strided keys = {x + 900, {2 * 45, 45, 1}, 0}, others = {floats + 90, {2, 1, 10}, 1}, a = {floats, {700, 19, 1}, 1};
    const strided one_a = {floats, {1, 0, 0}, 1};
    for (int64_t way = 0; way < 8; way++) {
        memcpy(states, x, sizeof states);
        const conv_args conv = {batch, {x, {0, 1, 5}, 0}, {floats, {0, 70, 1}, 1}, way & 1 ? keys : none, 70, 4, way % 7 - 1};
        EXPORT(causal_conv)(&conv), add(5 * 70);
        memcpy(states, floats, sizeof states);
        const delta_args delta = {batch, keys, others, heads, decays, decays, 2, 45, 4, 37, way & 1};
        EXPORT(gated_delta_rule)(&delta), add(5 * 4 * 37);
        const scan_args scan = {
            batch, heads, heads, way & 1 ? a : one_a, keys, others, way & 2 ? heads : none, way & 4 ? heads : none, heads,
            4, 37, 2, 19, 0, 0.5f
        };
        EXPORT(selective_scan)(&scan), add(5 * 4 * 37);
    }
    print("recurrent");
}

int main(void) {
    draw_inputs();
    multiply();
    multiply_codes(1, INT8);
    multiply_codes(0, E2M1);
    attend();
    compute_elements();
    recur();
}
