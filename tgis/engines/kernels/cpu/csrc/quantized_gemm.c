/* Linear layers with a weight in codes: y [m, n] = x [m, k] times a weight [n, k], plus a bias.

   Numbers of x become codes of 8 bits times a scale of their row and group, or of their row: amax / steps, codes rounded
   to nearest even. The sum of products over a segment, the inputs with the same scales, is an integer, and exact. Segments
   times their scale of x are added in float32 in the order of k, then ranges times their scale of the weight, likewise,
   each product in one rounding. So a row of x gives the same bits whatever is beside it and under every instruction set. */

#include "codes.h"

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
#define STEP 8               /* inputs: those of a byte of codes of 4 bits */

/* UNIT inputs of TILE_M rows of x; a segment and a range are described where they begin. */
typedef struct {
    float scale[TILE_M];
    int32_t minus_128[TILE_M]; /* times the sum of the codes of the segment */
    float sum[TILE_M];         /* of the range: of codes times their scale */
} x_unit;

typedef struct {
    const packed_codes *weight;
    const scalar_t *x, *bias; /* [m, k]; [n] or NULL */
    scalar_t *y;              /* [m, n] */
    x_unit *units;            /* [m / TILE_M, inputs / UNIT] */
    code_t *codes;            /* [m, stride] */
    int64_t k, n, inputs, segment, stride;
} quantized_args;

/* How some numbers of x are rounded: to multiples of the scale. */
typedef struct {
    float scale, factor, low, high;
} x_rounding;

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

static inline f32_vec load_x(const quantized_args *args, int64_t row, int64_t at) {
    return at < args->k ? load_partial(args->x + row * args->k + at, args->k - at) : (f32_vec){0};
}

/* For the numbers from `at` on up to `end`. */
static inline x_rounding rounding_of(const quantized_args *args, int64_t row, int64_t at, int64_t end) {
    u32_vec largest = {0}; /* the bits of absolute values are in the order of these, NaN last */
    for (; at < end; at += LANES) largest = max_u32(largest, (u32_vec)load_x(args, row, at) & 0x7fffffff);
    const uint32_t bits = reduce_max_u32(largest);
    const float fixed = args->weight->scale, steps = args->weight->steps;
    float amax;
    memcpy(&amax, &bits, sizeof amax);
    if (fixed != 0 && bits <= 0x7f800000) return (x_rounding){fixed, 1 / fixed, -128 * fixed, 127 * fixed};
    if (bits >= 0x7f800000) return (x_rounding){.scale = amax};
    if (amax < TINY) return (x_rounding){0};
    const float scale = amax / steps;
    float factor = steps / amax;
    if (fmaf(factor, amax, -steps) < 0) factor += factor * 0x1p-24f * 1.5f; /* else the largest number may get 127 of 127.5 steps */
    return (x_rounding){scale, factor, -128 * scale, 127 * scale};
}

static void quantize_row(const quantized_args *args, int64_t row) {
    const int64_t r = row % TILE_M, range = args->weight->range, per_group = args->weight->per_group;
    x_unit *units = args->units + row / TILE_M * (args->inputs / UNIT), *of_segment = units, *of_range = units;
    code_t *codes = args->codes + row * args->stride;
    const x_rounding whole = per_group ? (x_rounding){0} : rounding_of(args, row, 0, args->k);
    int64_t segment_end = 0, range_end = 0;
    for (int64_t group = 0; group < args->inputs; group += GROUP) {
        const x_rounding how = per_group ? rounding_of(args, row, group, group + GROUP) : whole;
        for (int64_t at = group, end; at < group + GROUP; at = end) {
            end = at + min_i64(args->segment, GROUP);
            u32_vec sum = {0};
            for (int64_t i = at; i < end; i += LANES) {
                f32_vec x = max_vec((f32_vec){0} - load_x(args, row, i), (f32_vec){0} - how.high);
                x = max_vec((f32_vec){0} - x, (f32_vec){0} + how.low);
                /* 1.5 * 2^23: the rounded number moves to the lowest bits */
                const i32_vec code = (i32_vec)fma_vec(x, (f32_vec){0} + how.factor, (f32_vec){0} + 12582912.0f) - 0x4b400000;
                sum += (u32_vec)code;
                code_vec narrow = __builtin_convertvector(code, code_vec);
#if defined(__AVX512VNNI__)
                narrow = (code_vec)_mm_shuffle_epi8((__m128i)narrow, _mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15));
#endif
                memcpy(codes + i, &narrow, sizeof narrow);
            }
            if (at == segment_end) {
                segment_end += args->segment, of_segment = units + at / UNIT;
                of_segment->scale[r] = how.scale, of_segment->minus_128[r] = 0;
            }
            if (at == range_end) range_end += range, of_range = units + at / UNIT, of_range->sum[r] = 0;
            const int32_t total = reduce_add_u32(sum);
            of_segment->minus_128[r] -= 128 * total;
            of_range->sum[r] = fmaf(total, per_group ? how.scale : 1, of_range->sum[r]);
        }
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
    const packed_codes *weight = args->weight;
    const x_unit *units = args->units + row / TILE_M * (args->inputs / UNIT);
    const code_t *x = args->codes + row * args->stride;
    const uint8_t *codes = weight->codes + (tile * args->inputs * bits / 8 * TILE_N + first * 4);
    f32_vec sums[TILE_M][VECTORS] = {{{0}}}, of_range[TILE_M][VECTORS] = {{{0}}};
    for (int64_t range = 0, at = 0; at < args->inputs; range++) {
        const x_unit *begin = units + at / UNIT;
        for (int64_t range_end = min_i64(at + weight->range, args->inputs); at < range_end;) {
            const x_unit *unit = units + at / UNIT;
            i32_vec dots[TILE_M][VECTORS];
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++)
                for (int i = 0; i < VECTORS; i++) dots[r][i] = (i32_vec){0} + (bits == 8 ? unit->minus_128[r] : 0);
            for (int64_t end = min_i64(at + args->segment, range_end); at < end; at += STEP, codes += bits * TILE_N, x += STEP) {
                u32_vec four[VECTORS];
#pragma GCC unroll 2
                for (int quad = 0; quad < 2; quad++) {
                    for (int i = 0; i < VECTORS; i++) {
                        const uint8_t *from = codes + (bits == 8 ? quad * TILE_N + i * LANES : i * LANES) * 4;
                        if (bits == 8 || !quad) __builtin_prefetch(from + CODES_AHEAD);
                        four[i] = bits == 8 ? load_u32(from) : load_u32(from) >> 4 * quad & 0x0f0f0f0f;
                    }
#pragma GCC unroll 8
                    for (int r = 0; r < rows; r++)
                        for (int i = 0; i < VECTORS; i++) dots[r][i] = dot(dots[r][i], x + r * args->stride + 4 * quad, four[i]);
                }
            }
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) {
                const f32_vec scale = (f32_vec){0} + (weight->per_group ? unit->scale[r] : 1.0f);
                for (int i = 0; i < VECTORS; i++)
                    of_range[r][i] = fma_vec(__builtin_convertvector(dots[r][i], f32_vec), scale, of_range[r][i]);
            }
        }
        for (int i = 0; i < VECTORS; i++) {
            const f32_vec scale = load_range(weight, tile, range, 0, first + i * LANES);
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) sums[r][i] = fma_vec(of_range[r][i], scale, sums[r][i]), of_range[r][i] = (f32_vec){0};
            if (!weight->has_offset) continue;
            const f32_vec offset = load_range(weight, tile, range, 1, first + i * LANES);
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) sums[r][i] = fma_vec(offset, (f32_vec){0} + begin->sum[r], sums[r][i]);
        }
    }
    for (int i = 0; i < VECTORS; i++) {
        const int64_t column = tile * TILE_N + first + i * LANES;
        if (column >= args->n) return;
        const f32_vec bias = args->bias ? load_partial(args->bias + column, args->n - column) : (f32_vec){0};
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            const f32_vec scale = (f32_vec){0} + (weight->per_group ? 1.0f : units->scale[r]);
            store_partial(args->y + (row + r) * args->n + column, fma_vec(sums[r][i], scale, bias), args->n - column);
        }
    }
}

static void multiply_tile(const quantized_args *args, int64_t row, int64_t rows, int64_t tile) {
#define ROWS(count) \
    case count: \
        if (args->weight->kind == INT8) multiply_rows(8, count, args, row, tile, first); \
        else multiply_rows(4, count, args, row, tile, first); \
        break;
    for (int64_t first = 0; first < TILE_N; first += VECTORS * LANES)
        switch (rows) {
            ROWS(1) ROWS(2) ROWS(3) ROWS(4)
#if TILE_M > 4
            ROWS(5) ROWS(6) ROWS(7) ROWS(8)
#endif
        }
}

/* `scratch` has memory for an x_unit of each TILE_M rows and UNIT inputs, and then for codes, CACHE_LINE beyond those of
   the inputs for each row: strides that are powers of two would share few sets of a cache. */
void EXPORT(quantized_gemm)(
    const scalar_t *x, const packed_codes *weight, const scalar_t *bias, scalar_t *y, void *scratch, int64_t m, int64_t k,
    int64_t n, int64_t threads
) {
    const int64_t inputs = padded_inputs(k), tiles = (n + TILE_N - 1) / TILE_N, chunks = (m + CHUNK_M - 1) / CHUNK_M;
    x_unit *units = scratch;
    const quantized_args args = {
        weight, x, bias, y, units, (code_t *)(units + (m + TILE_M - 1) / TILE_M * (inputs / UNIT)), k, n, inputs,
        weight->per_group ? min_i64(weight->range, GROUP) : weight->range, inputs + CACHE_LINE
    };
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

/* y [m, k] = x [m, order]. */
void EXPORT(take_columns)(const scalar_t *x, const int64_t *order, scalar_t *y, int64_t m, int64_t k, int64_t threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t row = 0; row < m; row++)
        for (int64_t i = 0; i < k; i++) y[row * k + i] = x[row * k + order[i]];
}
