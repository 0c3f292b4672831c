/* Linear layers with a weight in codes: y [m, n] = x [m, k] times a weight [n, k], plus a bias.

   Values of x become codes of 8 bits times a scale of their row and block, or of their row: amax / steps, codes rounded
   to nearest even. The sum of products over a span, the inputs with one scale in x and one in the weight, is an integer,
   and exact. Spans times their scale of x are added in float32 in the order of k, then groups times their scale of the
   weight, likewise, each product in one rounding. So a row of x gives the same bits whatever is beside it and under every
   instruction set. */

#include "amx.h"
#include "experts.h"

#include <stdlib.h>

#define TINY 0x1p-100f /* a block without larger values is zero */
typedef int8_t i8_vec __attribute__((vector_size(LANES)));
typedef int16_t i16_vec __attribute__((vector_size(2 * LANES))), short_vec __attribute__((vector_size(4 * LANES)));

/* TILE_M rows are computed together, for VECTORS of outputs. A code of x has CODE_SIZE bytes, by the bits of the weight's:
   with one, four are in the order of the weight's. With SHORT_SUMS products of codes of 4 bits, 15 * 128 at the most, are
   added in 16 bits: those of two inputs, 8 times. With SIGNED_CODES those of 8 bits are multiplied less 128. */
#if defined(__AVX512VNNI__) || defined(__ARM_FEATURE_DOTPROD)
#define TILE_M 8
#else
#define TILE_M 4
#endif
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__) || defined(__ARM_FEATURE_DOTPROD)
#define CODE_SIZE(bits) 1
#define SHORT_SUMS(bits) 0
#elif defined(__AVX2__)
#define CODE_SIZE(bits) (bits == 8 ? 2 : 1)
#define SHORT_SUMS(bits) (bits == 4)
#else
#define CODE_SIZE(bits) 2
#define SHORT_SUMS(bits) 0
#endif
#if defined(__ARM_FEATURE_DOTPROD) && !defined(__ARM_FEATURE_MATMUL_INT8)
#define SIGNED_CODES 1
#else
#define SIGNED_CODES 0
#endif
#define VECTORS 2
#define CHUNK_M (4 * TILE_M) /* rows that a thread takes at a time */
#define MAX_SMALL (1 << 16)  /* bytes on the stack */
#define MIN_AMX_ROWS 16      /* from here on AMX multiplies codes of 8 bits if it may: sums are the same */
#define MAX_AMX_INPUTS 64    /* in a tile register */

/* HALF_BLOCK inputs of TILE_M rows of x; a span and a group are described where they begin. */
typedef struct {
    float scale[TILE_M];
    int32_t minus_128[TILE_M]; /* times the sum of the codes of the span */
    float sum[TILE_M];         /* of the codes of the group times their scale */
} half_block;

typedef struct {
    const packed_codes *weight;
    const scalar_t *x, *bias; /* [m, k]; [n] or NULL */
    scalar_t *y;              /* [m, n] */
    half_block *halves;       /* [m / TILE_M, inputs / HALF_BLOCK] */
    char *codes;              /* [m / TILE_M, inputs / 4, TILE_M, 4, CODE_SIZE]; for AMX [m, inputs] */
    int64_t k, n, inputs, span;
    int64_t amx_inputs; /* in a tile register; 0 where AMX does not multiply */
} quantized_args;

static inline f32_vec load_x(const quantized_args *args, int64_t row, int64_t at) {
    return at < args->k ? load_partial(args->x + row * args->k + at, args->k - at) : (f32_vec){0};
}

/* How LANES blocks of x are rounded: to multiples of the scale. */
typedef struct {
    f32_vec scale, factor;
} x_rounding;

/* The maximum, or the sum, of all lanes. */
INLINE uint32_t reduce_u32(const int adds, u32_vec x) {
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

/* The largest absolute values of the block from input `at` on, by lane, as bits. */
INLINE u32_vec largest_of_block(const quantized_args *args, int64_t row, int64_t at) {
    u32_vec largest = {0};
    for (int64_t i = at; i < at + BLOCK; i += LANES) largest = max_u32(largest, (u32_vec)load_x(args, row, i) & 0x7fffffff);
    return largest;
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
    return __builtin_convertvector(__builtin_shuffle(codes, (i32_vec){0, 2, 1, 3}), i8_vec);
#endif
}

/* Quantizes a block of x; `totals` gets the sum of the codes of each half, or of both if they belong to one span. */
INLINE void quantize_block(
    const int size, const quantized_args *args, int64_t row, int64_t at, float scale, float factor, int32_t totals[2]
) {
    char codes[BLOCK * 2], *to = args->codes + ((row / TILE_M * args->inputs + at) * TILE_M + row % TILE_M * 4) * size;
    u32_vec sums[2] = {{0}};
#pragma GCC unroll 8
    for (int64_t i = 0; i < BLOCK; i += LANES) {
        f32_vec x = load_x(args, row, at + i);
        if (args->weight->scale != 0 || args->weight->steps > 127) {
            x = -max_vec(-x, broadcast(-127 * scale));
            x = max_vec(x, broadcast(-128 * scale));
        }
        /* 1.5 * 2^23: the rounded number moves to the lowest bits */
        const i32_vec code = (i32_vec)fma_vec(x, broadcast(factor), broadcast(12582912.0f)) - 0x4b400000;
        sums[i / HALF_BLOCK] += (u32_vec)code;
        const i8_vec narrow = narrow_codes(code);
        const i16_vec wide = __builtin_convertvector(code, i16_vec);
        if (size == 1) memcpy(codes + i, &narrow, sizeof narrow);
        else memcpy(codes + i * 2, &wide, sizeof wide);
    }
    if (HAS_AMX && args->amx_inputs) memcpy(args->codes + row * args->inputs + at, codes, BLOCK);
    else for (int i = 0; i < BLOCK; i += 4) memcpy(to + i * TILE_M * size, codes + i * size, 4 * size);
    if (args->span == HALF_BLOCK) totals[0] = reduce_u32(1, sums[0]), totals[1] = reduce_u32(1, sums[1]);
    else totals[0] = reduce_u32(1, sums[0] + sums[1]), totals[1] = 0;
}

static void quantize_row(const quantized_args *args, int64_t row) {
    const packed_codes *weight = args->weight;
    const int64_t r = row % TILE_M;
    half_block *halves = args->halves + row / TILE_M * (args->inputs / HALF_BLOCK), *span = halves, *group = halves;
    u32_vec amax = {0};
    for (int64_t at = 0; !weight->per_block && at < args->inputs; at += BLOCK)
        amax = max_u32(amax, largest_of_block(args, row, at));
    amax = (u32_vec){0} + reduce_u32(0, amax);
    for (int64_t first = 0, span_end = 0, group_end = 0; first < args->inputs; first += LANES * BLOCK) {
        const int64_t blocks = min_i64(LANES, (args->inputs - first) / BLOCK);
        uint32_t largest[LANES] = {0};
        float scales[LANES], factors[LANES];
        for (int64_t i = 0; weight->per_block && i < blocks; i++)
            largest[i] = reduce_u32(0, largest_of_block(args, row, first + i * BLOCK));
        if (weight->per_block) memcpy(&amax, largest, sizeof amax);
        const x_rounding how = rounding_of(weight, amax);
        memcpy(scales, &how.scale, sizeof scales), memcpy(factors, &how.factor, sizeof factors);
        for (int64_t i = 0; i < blocks; i++) {
            int32_t totals[2];
            if (CODE_SIZE(8) != 1 && weight->kind == INT8)
                quantize_block(CODE_SIZE(8), args, row, first + i * BLOCK, scales[i], factors[i], totals);
            else quantize_block(CODE_SIZE(4), args, row, first + i * BLOCK, scales[i], factors[i], totals);
            for (int64_t at = first + i * BLOCK, half = 0; half < 1 + (args->span == HALF_BLOCK); half++, at += HALF_BLOCK) {
                if (at == span_end) {
                    span_end += args->span, span = halves + at / HALF_BLOCK;
                    span->scale[r] = scales[i], span->minus_128[r] = 0;
                }
                if (at == group_end) group_end += weight->group_size, group = halves + at / HALF_BLOCK, group->sum[r] = 0;
                span->minus_128[r] = (int32_t)((uint32_t)span->minus_128[r] - 128u * (uint32_t)totals[half]);
                if (weight->has_offset) group->sum[r] = fmaf(totals[half], weight->per_block ? scales[i] : 1, group->sum[r]);
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

/* sums += the products of four codes of row r of x, the same for all lanes, with four of each lane's */
INLINE i32_vec dot(const int bits, i32_vec sums, const char *x, const int r, u32_vec weights) {
#if defined(__ARM_FEATURE_DOTPROD)
    const int8x16_t rows = vld1q_s8((const int8_t *)x + r / 4 * 16); /* four rows */
#if SIGNED_CODES
    return (i32_vec)vdotq_laneq_s32((int32x4_t)sums, (int8x16_t)weights, rows, r % 4);
#else
    return (i32_vec)vusdotq_laneq_s32((int32x4_t)sums, (uint8x16_t)weights, rows, r % 4);
#endif
#else
    x += r * 4 * CODE_SIZE(bits);
    const i32_vec first = broadcast_bytes(x);
#if defined(__AVX512VNNI__)
    return (i32_vec)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)weights, (__m512i)first);
#elif defined(__AVXVNNI__)
    return (i32_vec)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)weights, (__m256i)first);
#elif defined(__AVX512F__)
    if (SHORT_SUMS(bits)) return keep((i32_vec)((short_vec)sums + (short_vec)_mm512_maddubs_epi16((__m512i)weights, (__m512i)first)));
#elif defined(__AVX2__)
    if (SHORT_SUMS(bits)) return keep((i32_vec)((short_vec)sums + (short_vec)_mm256_maddubs_epi16((__m256i)weights, (__m256i)first)));
#endif
    const i32_vec even = (i32_vec)(weights & 0x00ff00ff), odd = (i32_vec)((weights >> 8) & 0x00ff00ff);
    return keep(sums + (multiply_words(even, first) + multiply_words(odd, broadcast_bytes(x + 4))));
#endif
}

enum { ANY_GROUPS, GROUPS_ARE_BLOCKS, ONE_GROUP }; /* of the weight; with the last two a span is a block */

/* dots += the products of `inputs` codes of rows of x with those of VECTORS of outputs; fetches `next`. */
INLINE void add_products(
    const int bits, const int rows, const int inputs, const char *x, const uint8_t *codes, const uint8_t *next,
    int64_t next_step, i32_vec (*dots)[VECTORS]
) {
    i32_vec part[TILE_M][VECTORS]; /* of these inputs alone with SHORT_SUMS */
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < VECTORS; i++) part[r][i] = SHORT_SUMS(bits) ? (i32_vec){0} : dots[r][i];
#pragma GCC unroll 8
    for (int quad = 0; quad < inputs / 4; quad++) {
        u32_vec four[VECTORS];
        for (int i = 0; i < VECTORS; i++) {
            const uint8_t *from = codes + ((bits == 8 ? quad : quad / 2) * TILE_N + i * LANES) * 4;
            if (bits == 8 || i == 0) __builtin_prefetch(next + quad * next_step + i * CACHE_LINE);
            four[i] = bits == 8 ? load_u32(from) : load_u32(from) >> 4 * (quad % 2) & 0x0f0f0f0f;
            if (bits == 8 && SIGNED_CODES) four[i] ^= 0x80808080;
        }
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
            for (int i = 0; i < VECTORS; i++)
                part[r][i] = dot(bits, part[r][i], x + quad * TILE_M * 4 * CODE_SIZE(bits), r, four[i]);
    }
    const i32_vec ones = (i32_vec){0} + 0x10001;
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < VECTORS; i++)
            dots[r][i] = SHORT_SUMS(bits) ? dots[r][i] + multiply_words(ones, part[r][i]) : part[r][i];
}

/* The tiles of add_products_by_amx: 0 and 1 for dots, 2 for x, 3 and 4 for codes. */
static void configure_for_codes(uint8_t inputs) {
    const uint8_t rows[8] = {TILE_M, TILE_M, TILE_M, inputs / 4, inputs / 4}, row_bytes[8] = {64, 64, inputs, 64, 64};
    configure_tiles(rows, row_bytes);
}

/* dots += the products of `inputs` codes of 8 bits of TILE_M rows of x with those of a tile of outputs. */
INLINE void add_products_by_amx(
    const quantized_args *args, int64_t inputs, const char *x, const uint8_t *codes, i32_vec (*dots)[VECTORS]
) {
    TILE_LOAD(0, &dots[0][0], VECTORS);
    TILE_LOAD(1, &dots[0][1], VECTORS);
    for (int64_t i = 0; i < inputs; i += args->amx_inputs) {
        TILE_LOAD(2, x + i, args->inputs);
        TILE_LOAD(3, codes + i * TILE_N, TILE_N * 4);
        TILE_LOAD(4, codes + i * TILE_N + CACHE_LINE, TILE_N * 4);
        TILE_MULTIPLY_ADD("tdpbsud", 0, 2, 3);
        TILE_MULTIPLY_ADD("tdpbsud", 1, 2, 4);
    }
    TILE_STORE(0, &dots[0][0], VECTORS);
    TILE_STORE(1, &dots[0][1], VECTORS);
}

/* Adds the dots of a span, times its scale of x, to the sums of its group, and those of a group that ends here, times its
   scale of the weight, to the sums of outputs. */
INLINE void add_span(
    const int groups, const int rows, const packed_codes *weight, int64_t tile, int64_t first, int64_t group, const int ends,
    const half_block *span, const half_block *group_begin, i32_vec (*dots)[VECTORS], f32_vec (*of_group)[VECTORS],
    f32_vec (*sums)[VECTORS]
) {
    for (int i = 0; i < VECTORS; i++) {
        f32_vec scale = {0}, offset = {0};
        if (ends) scale = load_group(weight, tile, group, 0, first + i * LANES);
        if (ends && weight->has_offset) offset = load_group(weight, tile, group, 1, first + i * LANES);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            const f32_vec x_scale = broadcast(groups == ANY_GROUPS && !weight->per_block ? 1.0f : span->scale[r]);
            const f32_vec product = __builtin_convertvector(dots[r][i], f32_vec);
            if (groups == GROUPS_ARE_BLOCKS) {
                sums[r][i] = fma_vec(product * x_scale, scale, sums[r][i]);
                continue;
            }
            of_group[r][i] = fma_vec(product, x_scale, of_group[r][i]);
            if (ends) sums[r][i] = fma_vec(of_group[r][i], scale, sums[r][i]), of_group[r][i] = (f32_vec){0};
        }
        if (!ends || !weight->has_offset) continue;
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) sums[r][i] = fma_vec(offset, broadcast(group_begin->sum[r]), sums[r][i]);
    }
}

/* Stores outputs of the first `stored` rows; with ONE_GROUP its scale of the weight is still to be multiplied. */
INLINE void store_outputs(
    const int groups, const int rows, int64_t stored, const quantized_args *args, int64_t row, int64_t tile, int64_t first,
    const half_block *halves, f32_vec (*sums)[VECTORS]
) {
    const packed_codes *weight = args->weight;
    for (int i = 0; i < VECTORS; i++) {
        const int64_t column = tile * TILE_N + first + i * LANES;
        if (column >= args->n) return;
        const f32_vec bias = args->bias ? load_partial(args->bias + column, args->n - column) : (f32_vec){0};
        f32_vec scale = broadcast(1.0f), offset = {0};
        if (groups == ONE_GROUP) scale = load_group(weight, tile, 0, 0, first + i * LANES);
        if (groups == ONE_GROUP && weight->has_offset) offset = load_group(weight, tile, 0, 1, first + i * LANES);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            f32_vec y = groups == ONE_GROUP ? sums[r][i] * scale : sums[r][i];
            if (groups == ONE_GROUP && weight->has_offset) y = fma_vec(offset, broadcast(halves->sum[r]), y);
            y = fma_vec(y, broadcast(weight->per_block ? 1.0f : halves->scale[r]), bias);
            if (r < stored) store_partial(args->y + (row + r) * args->n + column, y, args->n - column);
        }
    }
}

/* VECTORS of outputs of a tile, from `first` on, for some rows from `row` on; with `by_amx` for TILE_M of them. */
INLINE void multiply_rows(
    const int by_amx, const int bits, const int groups, const int rows, int64_t stored, const quantized_args *args,
    int64_t row, int64_t tile, int64_t first, const uint8_t *next, int64_t next_step
) {
    const packed_codes *weight = args->weight;
    const int step = groups == ANY_GROUPS ? HALF_BLOCK : BLOCK;
    const half_block *halves = args->halves + row / TILE_M * (args->inputs / HALF_BLOCK), *span = halves, *group_begin = halves;
    const char *x = args->codes + row * args->inputs * CODE_SIZE(bits);
    const uint8_t *codes = weight->codes + (tile * args->inputs * bits / 8 * TILE_N + first * 4);
    f32_vec sums[TILE_M][VECTORS], of_group[TILE_M][VECTORS];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < VECTORS; i++) sums[r][i] = of_group[r][i] = (f32_vec){0};
    for (int64_t group = 0, at = 0, group_end = weight->group_size; at < args->inputs;) {
        i32_vec dots[TILE_M][VECTORS];
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
            for (int i = 0; i < VECTORS; i++) dots[r][i] = (i32_vec){0} + (bits == 8 && !SIGNED_CODES ? span->minus_128[r] : 0);
        const int64_t end = groups == ANY_GROUPS ? min_i64(at + args->span, args->inputs) : at + BLOCK;
        if (by_amx) {
            add_products_by_amx(args, end - at, x + at, codes + at * TILE_N, dots);
            at = end;
        } else {
            do {
                add_products(bits, rows, step, x, codes, next, next_step, dots);
                at += step, codes += step * TILE_N * bits / 8, x += step * TILE_M * CODE_SIZE(bits);
                next += step / 4 * next_step;
            } while (groups == ANY_GROUPS && at < end);
        }
        const int ends = groups == GROUPS_ARE_BLOCKS || (groups == ANY_GROUPS && (at >= group_end || at == args->inputs));
        add_span(groups, rows, weight, tile, first, group, ends, span, group_begin, dots, of_group, sums);
        span = halves + at / HALF_BLOCK;
        if (ends) group++, group_end += weight->group_size, group_begin = span;
    }
    store_outputs(groups, rows, stored, args, row, tile, first, halves, groups == ONE_GROUP ? of_group : sums);
}

/* Rows that are missing in a tile are computed as well, but not stored. */
static void multiply_tile(
    const quantized_args *args, int64_t row, int64_t rows, int64_t tile, const uint8_t *next, int64_t next_step
) {
    const packed_codes *weight = args->weight;
    const int64_t spans_are_blocks = weight->per_block && args->span == BLOCK, is_8_bit = weight->kind == INT8;
    for (int64_t first = 0; first < TILE_N; first += VECTORS * LANES) {
#define MULTIPLY_IF(condition, by_amx, bits, groups, count) \
    if (condition) { \
        multiply_rows(by_amx, bits, groups, count, rows, args, row, tile, first, next, next_step); \
        continue; \
    }
#define MULTIPLY(bits, groups, count) MULTIPLY_IF(rows <= count, 0, bits, groups, count)
#define MULTIPLY_BY_AMX(groups) MULTIPLY_IF(HAS_AMX && args->amx_inputs, 1, 8, groups, TILE_M)
#define MULTIPLY_FAST(bits, groups) \
    MULTIPLY(bits, groups, 1) MULTIPLY(bits, groups, 2) MULTIPLY(bits, groups, TILE_M / 2) \
    MULTIPLY(bits, groups, 3 * TILE_M / 4) MULTIPLY(bits, groups, TILE_M)
#define MULTIPLY_ANY(bits) \
    MULTIPLY(bits, ANY_GROUPS, 1) MULTIPLY(bits, ANY_GROUPS, TILE_M / 2) MULTIPLY(bits, ANY_GROUPS, TILE_M)
        if (is_8_bit && spans_are_blocks && weight->group_size >= args->inputs) {
            MULTIPLY_BY_AMX(ONE_GROUP)
            MULTIPLY_FAST(8, ONE_GROUP)
        } else if (is_8_bit) {
            MULTIPLY_BY_AMX(ANY_GROUPS)
            MULTIPLY_ANY(8)
        } else if (spans_are_blocks && weight->group_size == BLOCK) {
            MULTIPLY_FAST(4, GROUPS_ARE_BLOCKS)
        } else {
            MULTIPLY_ANY(4)
        }
    }
}

/* The outputs of one tile for the rows [first, last). One tile of rows fetches codes a little ahead; several share the
   codes of the next outputs. */
static void multiply_chunk(const quantized_args *args, int64_t first, int64_t last, int64_t tile) {
    const int64_t bits = args->weight->kind == INT8 ? 8 : 4, size = args->inputs * TILE_N * bits / 8;
    const int64_t count = (last - first + TILE_M - 1) / TILE_M;
    const uint8_t *next = args->weight->codes + tile * size + (count > 1 ? size : CODES_AHEAD);
    for (int64_t row = first; row < last; row += TILE_M, next += size / count)
        multiply_tile(args, row, min_i64(last - row, TILE_M), tile, next, TILE_N * bits / 2 / count);
}

static inline int64_t span_of(const packed_codes *weight) {
    return weight->per_block ? min_i64(weight->group_size, BLOCK) : weight->group_size;
}

/* Returns 0, or 1 if there is no memory. */
int EXPORT(quantized_gemm)(
    const scalar_t *x, const packed_codes *weight, const scalar_t *bias, scalar_t *y, int64_t m, int64_t k, int64_t n,
    int64_t threads
) {
    const int64_t inputs = padded_inputs(k), tiles = (n + TILE_N - 1) / TILE_N, chunks = (m + CHUNK_M - 1) / CHUNK_M;
    const int64_t bits = weight->kind == INT8 ? 8 : 4, row_tiles = (m + TILE_M - 1) / TILE_M;
    const size_t halves_size = row_tiles * (inputs / HALF_BLOCK) * sizeof(half_block);
    const size_t size = halves_size + row_tiles * TILE_M * inputs * (bits == 8 ? CODE_SIZE(8) : CODE_SIZE(4));
    char small[MAX_SMALL], *scratch = size <= sizeof small ? small : malloc(size);
    if (!scratch) return 1;
    const int64_t span = span_of(weight);
    const int64_t multiples = span | inputs | MAX_AMX_INPUTS; /* the lowest bit is the largest divisor of all three */
    const int by_amx = HAS_AMX && weight->may_use_amx && m >= MIN_AMX_ROWS;
    const quantized_args args = {
        weight, x, bias, y, (half_block *)scratch, scratch + halves_size, k, n, inputs, span,
        by_amx ? multiples & -multiples : 0
    };
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(static)
        for (int64_t row = 0; row < m; row++) quantize_row(&args, row);
        if (by_amx) configure_for_codes(args.amx_inputs);
#pragma omp for schedule(static)
        for (int64_t i = 0; i < tiles * chunks; i++) {
            const int64_t first = i % chunks * CHUNK_M;
            multiply_chunk(&args, first, min_i64(first + CHUNK_M, m), i / chunks);
        }
        if (by_amx) release_tiles();
    }
    if (scratch != small) free(scratch);
    return 0;
}

/* The same for the rows of experts, with weights of these codes. */
static quantized_args args_of(const expert_layer *layer, const packed_codes *weight, const scalar_t *bias) {
    const int64_t inputs = padded_inputs(layer->k);
    const int64_t halves_size = layer->num_rows / TILE_M * (inputs / HALF_BLOCK) * sizeof(half_block);
    half_block *halves = (half_block *)layer->codes;
    char *codes = layer->codes + halves_size;
    return (quantized_args){weight, layer->x, bias, layer->y, halves, codes, layer->k, layer->n, inputs, span_of(weight)};
}

/* For `quantize` of experts.h. */
void EXPORT(quantize_expert_row)(const expert_layer *layer, int64_t row) {
    const quantized_args args = args_of(layer, layer->weight, NULL);
    quantize_row(&args, row);
}

/* For `multiply` of experts.h. */
void EXPORT(multiply_quantized_expert)(const expert_layer *layer, const expert_block *rows, int64_t tile) {
    const packed_codes codes = expert_codes(layer, rows->expert);
    const quantized_args args = args_of(layer, &codes, expert_bias(layer, rows->expert));
    multiply_chunk(&args, rows->first, rows->last, tile);
}

/* y [m, k] = x [m, order]. */
void EXPORT(take_columns)(const scalar_t *x, const int64_t *order, scalar_t *y, int64_t m, int64_t k, int64_t threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t row = 0; row < m; row++)
        for (int64_t i = 0; i < k; i++) y[row * k + i] = x[row * k + order[i]];
}
