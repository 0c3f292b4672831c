/* Linear layers with a weight in codes: y [m, n] = x [m, k] times a weight [n, k], plus a bias.

   Numbers of x become codes of 8 bits times a scale of their row and group, or of their row: amax / steps, codes rounded
   to nearest even. The sum of products over a segment, the inputs with the same scales, is an integer, and exact. Segments
   times their scale of x are added in float32 in the order of k, then ranges times their scale of the weight, likewise,
   each product in one rounding. So a row of x gives the same bits whatever is beside it and under every instruction set. */

#include "codes.h"

#include <stdlib.h>

#define TINY 0x1p-100f /* a group without larger numbers is zero */

typedef int8_t i8_vec __attribute__((vector_size(LANES)));
typedef int16_t i16_vec __attribute__((vector_size(2 * LANES))), short_vec __attribute__((vector_size(4 * LANES)));

/* TILE_M rows are computed together, for VECTORS of outputs. A code of x has CODE_SIZE bytes, by the bits of the weight's:
   with one, four are in the order of the weight's. With SHORT_SUMS products of codes of 4 bits, 15 * 128 at the most, are
   added in 16 bits: those of two inputs, 8 times. */
#if defined(__AVX512VNNI__)
#define TILE_M 8
#define CODE_SIZE(bits) 1
#else
#define TILE_M 4
#if defined(__AVX2__)
#define CODE_SIZE(bits) (bits == 8 ? 2 : 1)
#else
#define CODE_SIZE(bits) 2
#endif
#endif
#define SHORT_SUMS(bits) (TILE_M == 4 && CODE_SIZE(bits) == 1)
#define VECTORS 2
#define CHUNK_M (4 * TILE_M) /* rows that a thread takes at a time */
#define MAX_SMALL (1 << 16)  /* bytes on the stack */

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
    char *codes;              /* [m / TILE_M, inputs / 4, TILE_M, 4, CODE_SIZE] */
    int64_t k, n, inputs, segment;
} quantized_args;

static inline f32_vec load_x(const quantized_args *args, int64_t row, int64_t at) {
    return at < args->k ? load_partial(args->x + row * args->k + at, args->k - at) : (f32_vec){0};
}

/* How LANES groups of x are rounded: to multiples of the scale. */
typedef struct {
    f32_vec scale, factor;
} x_rounding;

static inline u32_vec max_u32(u32_vec a, u32_vec b) {
#if defined(__AVX512F__)
    return (u32_vec)_mm512_max_epu32((__m512i)a, (__m512i)b);
#else
    const u32_vec larger = (u32_vec)(a > b);
    return (larger & a) | (~larger & b);
#endif
}

/* The maximum, or the sum, of all lanes. */
static inline __attribute__((always_inline)) uint32_t reduce_u32(const int adds, u32_vec x) {
    const u32_vec lane = LANE_INDEX;
#pragma GCC unroll 4
    for (uint32_t n = LANES / 2; n; n /= 2) {
        const u32_vec other = __builtin_shuffle(x, lane ^ n);
        x = adds ? x + other : max_u32(x, other);
    }
    return x[0];
}

/* `largest` has the bits of absolute values, which are in the order of these, NaN last. */
static inline x_rounding rounding_of(const packed_codes *weight, u32_vec largest) {
    const f32_vec amax = (f32_vec)largest, steps = broadcast(weight->steps);
    if (weight->scale != 0) {
        const u32_vec is_nan = (u32_vec)(amax != amax);
        return (x_rounding){(f32_vec)((u32_vec)broadcast(weight->scale) | is_nan), broadcast(1 / weight->scale)};
    }
    const u32_vec is_zero = (u32_vec)(amax < TINY), is_finite = (u32_vec)(largest < 0x7f800000);
    const f32_vec factor = steps / amax;
    /* Not rounded down, or the largest number gets 127 of 127.5 steps. */
    const u32_vec rounded_up = (u32_vec)factor + ((u32_vec)(fma_vec(factor, amax, -steps) < 0.0f) & 1);
    return (x_rounding){(f32_vec)((u32_vec)(amax / steps) & ~is_zero), (f32_vec)(rounded_up & ~is_zero & is_finite)};
}

/* Absolute values of inputs from `at` on, as bits, at the most GROUP. */
static inline __attribute__((always_inline)) u32_vec largest_of_group(const quantized_args *args, int64_t row, int64_t at) {
    u32_vec found = {0};
    for (int64_t i = at; i < at + GROUP; i += LANES) found = max_u32(found, (u32_vec)load_x(args, row, i) & 0x7fffffff);
    return found;
}

/* With CODE_SIZE 1. */
static inline i8_vec narrow_codes(i32_vec codes) {
#if defined(__AVX512F__)
    return (i8_vec)_mm512_cvtepi32_epi8(_mm512_shuffle_epi32((__m512i)codes, 0xd8));
#elif defined(__AVX2__)
    const __m256i fours = _mm256_shuffle_epi8((__m256i)codes, _mm256_set1_epi32(0x0c040800));
    const __m256i both = _mm256_permutevar8x32_epi32(fours, _mm256_set1_epi64x(4ll << 32));
    return (i8_vec)_mm_cvtsi128_si64(_mm256_castsi256_si128(both));
#else
    return __builtin_convertvector(codes, i8_vec);
#endif
}

/* Codes of a group of x; `totals` gets the sum of those of each unit. */
static inline __attribute__((always_inline)) void quantize_group(
    const int size, const quantized_args *args, int64_t row, int64_t at, float scale, float factor, int32_t totals[2]
) {
    char codes[GROUP * 2], *to = args->codes + ((row / TILE_M * args->inputs + at) * TILE_M + row % TILE_M * 4) * size;
    u32_vec sums[2] = {{0}};
#pragma GCC unroll 8
    for (int64_t i = 0; i < GROUP; i += LANES) {
        f32_vec x = load_x(args, row, at + i);
        if (args->weight->scale != 0 || args->weight->steps > 127) {
            x = -max_vec(-x, broadcast(-127 * scale));
            x = max_vec(x, broadcast(-128 * scale));
        }
        /* 1.5 * 2^23: the rounded number moves to the lowest bits */
        const i32_vec code = (i32_vec)fma_vec(x, broadcast(factor), broadcast(12582912.0f)) - 0x4b400000;
        sums[i / UNIT] += (u32_vec)code;
        const i8_vec narrow = narrow_codes(code);
        const i16_vec wide = __builtin_convertvector(code, i16_vec);
        if (size == 1) memcpy(codes + i, &narrow, sizeof narrow);
        else memcpy(codes + i * 2, &wide, sizeof wide);
    }
    for (int i = 0; i < GROUP; i += 4) memcpy(to + i * TILE_M * size, codes + i * size, 4 * size);
    if (args->segment == UNIT) totals[0] = reduce_u32(1, sums[0]), totals[1] = reduce_u32(1, sums[1]);
    else totals[0] = reduce_u32(1, sums[0] + sums[1]), totals[1] = 0;
}

static void quantize_row(const quantized_args *args, int64_t row) {
    const packed_codes *weight = args->weight;
    const int64_t r = row % TILE_M;
    x_unit *units = args->units + row / TILE_M * (args->inputs / UNIT), *segment = units, *range = units;
    u32_vec whole = {0};
    for (int64_t at = 0; !weight->per_group && at < args->inputs; at += GROUP)
        whole = max_u32(whole, largest_of_group(args, row, at));
    whole = (u32_vec){0} + reduce_u32(0, whole);
    for (int64_t first = 0, segment_end = 0, range_end = 0; first < args->inputs; first += LANES * GROUP) {
        const int64_t groups = min_i64(LANES, (args->inputs - first) / GROUP);
        uint32_t largest[LANES] = {0};
        float scales[LANES], factors[LANES];
        for (int64_t i = 0; weight->per_group && i < groups; i++)
            largest[i] = reduce_u32(0, largest_of_group(args, row, first + i * GROUP));
        if (weight->per_group) memcpy(&whole, largest, sizeof whole);
        const x_rounding how = rounding_of(weight, whole);
        memcpy(scales, &how.scale, sizeof scales), memcpy(factors, &how.factor, sizeof factors);
        for (int64_t i = 0; i < groups; i++) {
            int32_t totals[2];
            if (CODE_SIZE(8) != 1 && weight->kind == INT8)
                quantize_group(CODE_SIZE(8), args, row, first + i * GROUP, scales[i], factors[i], totals);
            else quantize_group(CODE_SIZE(4), args, row, first + i * GROUP, scales[i], factors[i], totals);
            for (int64_t at = first + i * GROUP, half = 0; half < 1 + (args->segment == UNIT); half++, at += UNIT) {
                if (at == segment_end) {
                    segment_end += args->segment, segment = units + at / UNIT;
                    segment->scale[r] = scales[i], segment->minus_128[r] = 0;
                }
                if (at == range_end) range_end += weight->range, range = units + at / UNIT, range->sum[r] = 0;
                segment->minus_128[r] = (int32_t)((uint32_t)segment->minus_128[r] - 128u * (uint32_t)totals[half]);
                if (weight->has_offset) range->sum[r] = fmaf(totals[half], weight->per_group ? scales[i] : 1, range->sum[r]);
            }
        }
    }
}

/* Four bytes in each lane. */
static inline i32_vec broadcast_bytes(const char *from) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    return (i32_vec)_mm256_broadcast_ss((const float *)from); /* else GCC loads eight bytes into a general register */
#else
    int32_t four;
    memcpy(&four, from, sizeof four);
    return (i32_vec){0} + four;
#endif
}

/* Products of 16 bits, those of each pair added. */
static inline i32_vec multiply_words(i32_vec a, i32_vec b) {
#if defined(__AVX512F__)
    return (i32_vec)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
    return (i32_vec)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(__SSE2__)
    return (i32_vec)_mm_madd_epi16((__m128i)a, (__m128i)b);
#else
    return (a << 16 >> 16) * (b << 16 >> 16) + (a >> 16) * (b >> 16);
#endif
}

/* A sum that is in a register: else GCC keeps all products of a loop in memory and adds them in a tree. */
static inline i32_vec keep(i32_vec sum) {
#if defined(__SSE2__)
    __asm__("" : "+v"(sum));
#endif
    return sum;
}

/* sums += the products of four codes of x, the same for all lanes, with four of each lane's */
static inline __attribute__((always_inline)) i32_vec dot(const int bits, i32_vec sums, const char *x, u32_vec weights) {
    const i32_vec first = broadcast_bytes(x);
#if defined(__AVX512VNNI__)
    return (i32_vec)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)weights, (__m512i)first);
#elif defined(__AVX512F__)
    if (SHORT_SUMS(bits)) return keep((i32_vec)((short_vec)sums + (short_vec)_mm512_maddubs_epi16((__m512i)weights, (__m512i)first)));
#elif defined(__AVX2__)
    if (SHORT_SUMS(bits)) return keep((i32_vec)((short_vec)sums + (short_vec)_mm256_maddubs_epi16((__m256i)weights, (__m256i)first)));
#endif
    const i32_vec even = (i32_vec)(weights & 0x00ff00ff), odd = (i32_vec)((weights >> 8) & 0x00ff00ff);
    return keep(sums + (multiply_words(even, first) + multiply_words(odd, broadcast_bytes(x + 4))));
}

enum { ANY, RANGES_ARE_GROUPS, ONE_RANGE }; /* the last two with segments of GROUP */

/* VECTORS of outputs of a tile, from `first` on, for some rows from `row` on. */
static inline __attribute__((always_inline)) void multiply_rows(
    const int bits, const int ranges, const int rows, int64_t stored, const quantized_args *args, int64_t row, int64_t tile,
    int64_t first, const uint8_t *next, int64_t next_step
) {
    const packed_codes *weight = args->weight;
    const int step = ranges == ANY ? UNIT : GROUP;
    const x_unit *units = args->units + row / TILE_M * (args->inputs / UNIT), *unit = units, *begin = units;
    const char *x = args->codes + row * args->inputs * CODE_SIZE(bits);
    const i32_vec ones = (i32_vec){0} + 0x10001;
    const uint8_t *codes = weight->codes + (tile * args->inputs * bits / 8 * TILE_N + first * 4);
    f32_vec sums[TILE_M][VECTORS], unfinished[TILE_M][VECTORS]; /* the latter of a range */
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < VECTORS; i++) sums[r][i] = unfinished[r][i] = (f32_vec){0};
    for (int64_t range = 0, at = 0, range_end = weight->range; at < args->inputs;) {
        i32_vec dots[TILE_M][VECTORS];
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
            for (int i = 0; i < VECTORS; i++) dots[r][i] = (i32_vec){0} + (bits == 8 ? unit->minus_128[r] : 0);
        const int64_t end = ranges == ANY ? min_i64(at + args->segment, args->inputs) : at + GROUP;
        do {
            i32_vec part[TILE_M][VECTORS]; /* of a step, with SHORT_SUMS */
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++)
                for (int i = 0; i < VECTORS; i++) part[r][i] = SHORT_SUMS(bits) ? (i32_vec){0} : dots[r][i];
#pragma GCC unroll 8
            for (int quad = 0; quad < step / 4; quad++) {
                u32_vec four[VECTORS];
                for (int i = 0; i < VECTORS; i++) {
                    const uint8_t *from = codes + ((bits == 8 ? quad : quad / 2) * TILE_N + i * LANES) * 4;
                    if (bits == 8 || i == 0) __builtin_prefetch(next + quad * next_step + i * CACHE_LINE);
                    four[i] = bits == 8 ? load_u32(from) : load_u32(from) >> 4 * (quad % 2) & 0x0f0f0f0f;
                }
#pragma GCC unroll 8
                for (int r = 0; r < rows; r++)
                    for (int i = 0; i < VECTORS; i++)
                        part[r][i] = dot(bits, part[r][i], x + (quad * TILE_M + r) * 4 * CODE_SIZE(bits), four[i]);
            }
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++)
                for (int i = 0; i < VECTORS; i++)
                    dots[r][i] = SHORT_SUMS(bits) ? dots[r][i] + multiply_words(ones, part[r][i]) : part[r][i];
            at += step, codes += step * TILE_N * bits / 8, x += step * TILE_M * CODE_SIZE(bits), next += step / 4 * next_step;
        } while (ranges == ANY && at < end);
        const int ends = ranges == RANGES_ARE_GROUPS || (ranges == ANY && (at >= range_end || at == args->inputs));
        for (int i = 0; i < VECTORS; i++) {
            f32_vec scale = {0}, offset = {0};
            if (ends) scale = load_range(weight, tile, range, 0, first + i * LANES);
            if (ends && weight->has_offset) offset = load_range(weight, tile, range, 1, first + i * LANES);
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) {
                const f32_vec x_scale = broadcast(ranges == ANY && !weight->per_group ? 1.0f : unit->scale[r]);
                const f32_vec product = __builtin_convertvector(dots[r][i], f32_vec);
                if (ranges == RANGES_ARE_GROUPS) {
                    sums[r][i] = fma_vec(product * x_scale, scale, sums[r][i]);
                    continue;
                }
                unfinished[r][i] = fma_vec(product, x_scale, unfinished[r][i]);
                if (ends) sums[r][i] = fma_vec(unfinished[r][i], scale, sums[r][i]), unfinished[r][i] = (f32_vec){0};
            }
            if (!ends || !weight->has_offset) continue;
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) sums[r][i] = fma_vec(offset, broadcast(begin->sum[r]), sums[r][i]);
        }
        unit = units + at / UNIT;
        if (ends) range++, range_end += weight->range, begin = unit;
    }
    for (int i = 0; i < VECTORS; i++) {
        const int64_t column = tile * TILE_N + first + i * LANES;
        if (column >= args->n) return;
        const f32_vec bias = args->bias ? load_partial(args->bias + column, args->n - column) : (f32_vec){0};
        f32_vec scale = broadcast(1.0f), offset = {0};
        if (ranges == ONE_RANGE) scale = load_range(weight, tile, 0, 0, first + i * LANES);
        if (ranges == ONE_RANGE && weight->has_offset) offset = load_range(weight, tile, 0, 1, first + i * LANES);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            f32_vec y = ranges == ONE_RANGE ? unfinished[r][i] * scale : sums[r][i];
            if (ranges == ONE_RANGE && weight->has_offset) y = fma_vec(offset, broadcast(units->sum[r]), y);
            y = fma_vec(y, broadcast(weight->per_group ? 1.0f : units->scale[r]), bias);
            if (r < stored) store_partial(args->y + (row + r) * args->n + column, y, args->n - column);
        }
    }
}

/* Rows that are missing in a tile are computed as well, but not stored. */
static void multiply_tile(
    const quantized_args *args, int64_t row, int64_t rows, int64_t tile, const uint8_t *next, int64_t next_step
) {
    const int64_t range = args->weight->range, has_groups = args->weight->per_group && args->segment == GROUP, is_8_bit = args->weight->kind == INT8;
    for (int64_t first = 0; first < TILE_N; first += VECTORS * LANES) {
#define MULTIPLY(bits, ranges, count) \
    if (rows <= count) { \
        multiply_rows(bits, ranges, count, rows, args, row, tile, first, next, next_step); \
        continue; \
    }
        if (is_8_bit && has_groups && range >= args->inputs) {
            MULTIPLY(8, ONE_RANGE, 1) MULTIPLY(8, ONE_RANGE, 2) MULTIPLY(8, ONE_RANGE, TILE_M / 2)
            MULTIPLY(8, ONE_RANGE, 3 * TILE_M / 4) MULTIPLY(8, ONE_RANGE, TILE_M)
        } else if (is_8_bit) {
            MULTIPLY(8, ANY, 1) MULTIPLY(8, ANY, TILE_M / 2) MULTIPLY(8, ANY, TILE_M)
        } else if (has_groups && range == GROUP) {
            MULTIPLY(4, RANGES_ARE_GROUPS, 1) MULTIPLY(4, RANGES_ARE_GROUPS, 2) MULTIPLY(4, RANGES_ARE_GROUPS, TILE_M / 2)
            MULTIPLY(4, RANGES_ARE_GROUPS, 3 * TILE_M / 4) MULTIPLY(4, RANGES_ARE_GROUPS, TILE_M)
        } else {
            MULTIPLY(4, ANY, 1) MULTIPLY(4, ANY, TILE_M / 2) MULTIPLY(4, ANY, TILE_M)
        }
    }
}

/* Returns 0, or 1 if there is no memory. */
int EXPORT(quantized_gemm)(
    const scalar_t *x, const packed_codes *weight, const scalar_t *bias, scalar_t *y, int64_t m, int64_t k, int64_t n,
    int64_t threads
) {
    const int64_t inputs = padded_inputs(k), tiles = (n + TILE_N - 1) / TILE_N, chunks = (m + CHUNK_M - 1) / CHUNK_M;
    const int64_t bits = weight->kind == INT8 ? 8 : 4, row_tiles = (m + TILE_M - 1) / TILE_M;
    const size_t units_size = row_tiles * (inputs / UNIT) * sizeof(x_unit);
    const size_t size = units_size + row_tiles * TILE_M * inputs * (bits == 8 ? CODE_SIZE(8) : CODE_SIZE(4));
    char small[MAX_SMALL], *scratch = size <= sizeof small ? small : malloc(size);
    if (!scratch) return 1;
    const quantized_args args = {
        weight, x, bias, y, (x_unit *)scratch, scratch + units_size, k, n, inputs,
        weight->per_group ? min_i64(weight->range, GROUP) : weight->range
    };
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(static)
        for (int64_t row = 0; row < m; row++) quantize_row(&args, row);
#pragma omp for schedule(static)
        for (int64_t unit = 0; unit < tiles * chunks; unit++) {
            const int64_t first = unit % chunks * CHUNK_M, last = min_i64(first + CHUNK_M, m), tile = unit / chunks;
            const int64_t count = (last - first + TILE_M - 1) / TILE_M, size = inputs * TILE_N * bits / 8;
            /* One tile of rows fetches codes a little ahead; several share the codes of the next outputs. */
            const uint8_t *next = weight->codes + tile * size + (count > 1 ? size : CODES_AHEAD);
            for (int64_t row = first; row < last; row += TILE_M, next += size / count)
                multiply_tile(&args, row, min_i64(last - row, TILE_M), tile, next, TILE_N * bits / 2 / count);
        }
    }
    if (scratch != small) free(scratch);
    return 0;
}

/* y [m, k] = x [m, order]. */
void EXPORT(take_columns)(const scalar_t *x, const int64_t *order, scalar_t *y, int64_t m, int64_t k, int64_t threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t row = 0; row < m; row++)
        for (int64_t i = 0; i < k; i++) y[row * k + i] = x[row * k + order[i]];
}
