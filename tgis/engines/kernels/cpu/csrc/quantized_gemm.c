/* Linear layers with a weight in codes: y [m, n] = x [m, k] times a weight [n, k], plus a bias.

   Numbers of x become codes of 8 bits times a scale of their row and group: amax / 127, codes rounded to nearest even. The
   sum of products over a group is an integer, and exact; groups are added in float32 in the order of k, each product with
   a scale or offset in one rounding. So a row of x gives the same bits whatever is beside it and under every instruction
   set. */

#include "codes.h"

#include <math.h>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#define TINY 0x1p-100f /* a group without larger numbers is zero */

typedef int8_t i8_vec __attribute__((vector_size(LANES)));
typedef int16_t i16_vec __attribute__((vector_size(2 * LANES)));

#if defined(__AVX512VNNI__)
typedef int8_t code_t; /* of x */
typedef i8_vec code_vec;
#define TILE_M 8 /* rows that are computed together, for VECTORS of outputs */
#define VECTORS 2
#else
typedef int16_t code_t;
typedef i16_vec code_vec;
#define TILE_M 4
#define VECTORS 2
#endif
#define CHUNK_M (4 * TILE_M) /* rows that a thread takes at a time */

typedef union {
    int32_t of_8_bits; /* -128 times the sum of the codes of a row and group */
    float of_4_bits;   /* this sum times their scale */
} code_sum;

/* A group of inputs of TILE_M rows of x. */
typedef struct {
    float scale[TILE_M];
    code_sum sum[TILE_M];
    code_t codes[GROUP / 4][TILE_M][4];
} row_group;

typedef struct {
    packed_codes weight;
    const scalar_t *x, *bias; /* [m, k]; [n] or NULL */
    scalar_t *y;              /* [m, n] */
    row_group *rows;          /* [m / TILE_M, groups] */
    int64_t k, n;
} quantized_args;

/* a * b + c, rounded once. */
static inline f32_vec fma_vec(f32_vec a, f32_vec b, f32_vec c) {
#if defined(__AVX512F__)
    return (f32_vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (f32_vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    f32_vec sum = {0};
    for (int lane = 0; lane < LANES; lane++) sum[lane] = fmaf(a[lane], b[lane], c[lane]);
    return sum;
#endif
}

static inline u32_vec max_u32(u32_vec a, u32_vec b) {
    const u32_vec larger = (u32_vec)(a > b);
    return (larger & a) | (~larger & b);
}

static inline uint32_t reduce_max_u32(u32_vec x) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_epu32((__m512i)x);
#else
    for (int lane = 1; lane < LANES; lane++) x[0] = x[lane] > x[0] ? x[lane] : x[0];
    return x[0];
#endif
}

static inline uint32_t reduce_add_u32(u32_vec x) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_epi32((__m512i)x);
#else
    for (int lane = 1; lane < LANES; lane++) x[0] += x[lane];
    return x[0];
#endif
}

static void quantize_row(const quantized_args *args, int64_t row) {
    for (int64_t group = 0; group < args->weight.groups; group++) {
        row_group *found = args->rows + row / TILE_M * args->weight.groups + group;
        f32_vec x[GROUP / LANES];
        u32_vec largest = {0}; /* the bits of absolute values are in the order of these, NaN last */
        for (int i = 0; i < GROUP / LANES; i++) {
            const int64_t at = group * GROUP + i * LANES;
            x[i] = at < args->k ? load_partial(args->x + row * args->k + at, args->k - at) : (f32_vec){0};
            largest = max_u32(largest, (u32_vec)x[i] & 0x7fffffff);
        }
        const uint32_t bits = reduce_max_u32(largest);
        float amax;
        memcpy(&amax, &bits, sizeof amax);
        const int is_zero = amax < TINY, is_finite = bits < 0x7f800000;
        const f32_vec factor = (f32_vec){0} + (is_zero || !is_finite ? 0.0f : 127.0f / amax);
        code_t codes[GROUP];
        u32_vec sum = {0};
        for (int i = 0; i < GROUP / LANES; i++) {
            /* 1.5 * 2^23: the rounded number moves to the lowest bits */
            const i32_vec code = (i32_vec)fma_vec(x[i], factor, (f32_vec){0} + 12582912.0f) - 0x4b400000;
            sum += (u32_vec)code;
            code_vec narrow = __builtin_convertvector(code, code_vec);
#if defined(__AVX512VNNI__)
            narrow = (code_vec)_mm_shuffle_epi8((__m128i)narrow, _mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15));
#endif
            memcpy(codes + i * LANES, &narrow, sizeof narrow);
        }
        uint32_t total = reduce_add_u32(sum);
        for (int quad = 0; quad < GROUP / 4; quad++) memcpy(found->codes[quad][row % TILE_M], codes + 4 * quad, sizeof *found->codes[0]);
        const float scale = found->scale[row % TILE_M] = is_zero ? 0.0f : amax / 127.0f;
        if (!is_finite) total = 0;
        if (args->weight.ranges) found->sum[row % TILE_M].of_4_bits = scale * (int32_t)total;
        else found->sum[row % TILE_M].of_8_bits = -128 * (int32_t)total;
    }
}

/* sums += the products of four codes of x, the same for all lanes, with four of each lane's */
static inline __attribute__((always_inline)) i32_vec dot(i32_vec sums, const code_t *x, u32_vec weights) {
#if defined(__AVX512VNNI__)
    int32_t quad;
    memcpy(&quad, x, sizeof quad);
    return (i32_vec)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)weights, _mm512_set1_epi32(quad));
#else
    const u32_vec even = weights & 0x00ff00ff, odd = (weights >> 8) & 0x00ff00ff;
#if defined(__SSE2__)
    int32_t pairs[2];
    memcpy(pairs, x, sizeof pairs);
    const i32_vec first = (i32_vec){0} + pairs[0], second = (i32_vec){0} + pairs[1];
#if defined(__AVX512F__)
    sums += (i32_vec)_mm512_madd_epi16((__m512i)even, (__m512i)first) + (i32_vec)_mm512_madd_epi16((__m512i)odd, (__m512i)second);
#elif defined(__AVX2__)
    sums += (i32_vec)_mm256_madd_epi16((__m256i)even, (__m256i)first) + (i32_vec)_mm256_madd_epi16((__m256i)odd, (__m256i)second);
#else
    sums += (i32_vec)_mm_madd_epi16((__m128i)even, (__m128i)first) + (i32_vec)_mm_madd_epi16((__m128i)odd, (__m128i)second);
#endif
    return sums;
#else
    sums += (i32_vec)(even & 0xff) * x[0] + (i32_vec)(even >> 16) * x[1];
    return sums + (i32_vec)(odd & 0xff) * x[2] + (i32_vec)(odd >> 16) * x[3];
#endif
#endif
}

/* VECTORS of outputs of a tile, from `first` on, for some rows from `row` on. */
static inline __attribute__((always_inline)) void multiply_rows(
    const int bits, const int rows, const quantized_args *args, int64_t row, int64_t tile, int64_t first
) {
    const row_group *x = args->rows + row / TILE_M * args->weight.groups;
    f32_vec sums[TILE_M][VECTORS] = {{{0}}};
    for (int64_t group = 0; group < args->weight.groups; group++, x++) {
        const uint8_t *weights = codes_of_group(&args->weight, bits, tile, group);
        i32_vec dots[TILE_M][VECTORS];
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
            for (int i = 0; i < VECTORS; i++) dots[r][i] = (i32_vec){0} + (bits == 8 ? x->sum[r].of_8_bits : 0);
#pragma GCC unroll 8
        for (int quad = 0; quad < GROUP / 4; quad++) {
            u32_vec four[VECTORS];
            for (int i = 0; i < VECTORS; i++) {
                four[i] = load_quad(weights, bits, quad, first + i * LANES);
                if (bits == 8 || quad % 2) __builtin_prefetch(weights + (quad * TILE_N + first + i * LANES) * bits / 2 + CODES_AHEAD);
            }
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++)
                for (int i = 0; i < VECTORS; i++) dots[r][i] = dot(dots[r][i], x->codes[quad][r], four[i]);
        }
        for (int i = 0; i < VECTORS; i++) {
            f32_vec scale = {0}, offset = {0};
            if (bits == 4) scale = load_range(&args->weight, tile, group, 0, first + i * LANES);
            if (bits == 4) offset = load_range(&args->weight, tile, group, 1, first + i * LANES);
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) {
                f32_vec product = __builtin_convertvector(dots[r][i], f32_vec); /* exact, with the scale of 4 bits as well */
                if (bits == 4) {
                    product *= scale;
                    sums[r][i] = fma_vec(offset, (f32_vec){0} + x->sum[r].of_4_bits, sums[r][i]);
                }
                sums[r][i] = fma_vec(product, (f32_vec){0} + x->scale[r], sums[r][i]);
            }
        }
    }
    for (int i = 0; i < VECTORS; i++) {
        const int64_t column = tile * TILE_N + first + i * LANES;
        if (column >= args->n) return;
        const f32_vec scale = bits == 8 ? load_f32(args->weight.scale + column) : (f32_vec){0} + 1.0f;
        const f32_vec bias = args->bias ? load_partial(args->bias + column, args->n - column) : (f32_vec){0};
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
            store_partial(args->y + (row + r) * args->n + column, fma_vec(sums[r][i], scale, bias), args->n - column);
    }
}

static void multiply_tile(const quantized_args *args, int64_t row, int64_t rows, int64_t tile) {
#define ROWS(count) \
    case count: \
        if (args->weight.ranges) multiply_rows(4, count, args, row, tile, first); \
        else multiply_rows(8, count, args, row, tile, first); \
        break;
    for (int64_t first = 0; first < TILE_N; first += VECTORS * LANES)
        switch (rows) {
            ROWS(1) ROWS(2) ROWS(3) ROWS(4)
#if TILE_M > 4
            ROWS(5) ROWS(6) ROWS(7) ROWS(8)
#endif
        }
}

/* `rows` has memory for a row_group of each TILE_M rows and group. */
void EXPORT(quantized_gemm)(
    const scalar_t *x, const uint8_t *weight, const uint16_t *ranges, const float *scale, const scalar_t *bias, scalar_t *y,
    row_group *rows, int64_t m, int64_t k, int64_t n, int64_t threads
) {
    const int64_t groups = (k + GROUP - 1) / GROUP, tiles = (n + TILE_N - 1) / TILE_N;
    const int64_t chunks = (m + CHUNK_M - 1) / CHUNK_M;
    const quantized_args args = {{weight, ranges, scale, groups}, x, bias, y, rows, k, n};
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(static)
        for (int64_t row = 0; row < m; row++) quantize_row(&args, row);
#pragma omp for schedule(static)
        for (int64_t unit = 0; unit < tiles * chunks; unit++) {
            const int64_t first = unit % chunks * CHUNK_M, last = min_i64(first + CHUNK_M, m);
            for (int64_t row = first; row < last; row += TILE_M)
                multiply_tile(&args, row, min_i64(last - row, TILE_M), unit / chunks);
        }
    }
}
