/* The blocks that linear layers are made of: some rows of x times a part of one tile of the weight, for weights in codes
   while the next part is dequantized. */

#ifndef GEMM_ROWS_H
#define GEMM_ROWS_H

#include "codes.h"

/* VECTORS of outputs are computed together for TILE_M rows: their sums fill most of the registers. */
#if defined(__AVX512F__)
#define VECTORS 2
#define TILE_M 8
#elif defined(__aarch64__)
#define VECTORS 4
#define TILE_M 6
#else
#define VECTORS 2
#define TILE_M 6
#endif

/* Steps along k of a block. Where it is read several times, it has to stay in the L1 cache. */
#define BLOCK_STEPS (WIDENS || VECTORS * LANES < TILE_N ? 8192 / (TILE_N * PAIR * (int)sizeof(packed_t)) : 1 << 20)

/* What multiply_rows dequantizes meanwhile, beside other kinds of codes: INT8 without its scale, exact in scalar_t; nothing. */
enum { INT8_UNSCALED = E2M1 + 1, PLAIN };

/* DEQUANT_INPUTS of a weight in codes multiply x while the next ones are dequantized, if registers are left for that. */
#if BF16 && defined(__AVX512BF16__)
#define DEQUANT_INPUTS 256
#define OVERLAP_DEQUANT 1
#else
#define DEQUANT_INPUTS 128
#define OVERLAP_DEQUANT 0
#endif

/* The values of LANES codes, each in the bits of a lane from `bit` on. */
INLINE f32_vec values_of(const int kind, u32_vec codes, int bit) {
#if defined(__AVX512F__)
    const f32_vec integers = LANE_INDEX; /* LANES of them, as many as codes of 4 bits */
    const f32_vec floats = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6};
    if (code_bits(kind) == 4)
        return (f32_vec)_mm512_permutexvar_ps((__m512i)(codes >> bit), (__m512)(kind == INT4 ? integers : floats));
#endif
    if (kind != E4M3 && kind != E2M1) { /* they become the lowest bits of 2^(23 - bit), of which the unit is at this bit */
        const uint32_t mask = kind == INT4 ? 15 : 255, zero = kind == INT4 ? 0 : 128;
        if (bit > 12) codes >>= 16, bit -= 16;
        return (f32_vec)((codes & mask << bit) | (150u - bit) << 23) - (float)((1u << (23 - bit)) + zero);
    }
    codes >>= bit;
    /* Exponents get a bias of 127 in place of 7 or 1. With the lowest one there is no leading 1: it is subtracted. */
    const int bits = code_bits(kind), mantissa = kind == E2M1 ? 1 : 3;
    const uint32_t one = 0x00800000, bias = kind == E2M1 ? 126 * one : 120 * one;
    const u32_vec size = codes & ((1u << (bits - 1)) - 1), is_tiny = (u32_vec)(size < 1u << mantissa);
    const u32_vec is_nan = (u32_vec)(size == (kind == E2M1 ? 8u : 0x7fu));
    const f32_vec value = (f32_vec)((size << (23 - mantissa)) + bias + (is_tiny & one)) - (f32_vec)(is_tiny & (bias + one));
    return (f32_vec)((u32_vec)value | (codes & 1u << (bits - 1)) << (32 - bits) | is_nan);
}

/* Two inputs by LANES outputs as packed weights have them. */
INLINE void store_two(const int kind, scalar_t *to, f32_vec first, f32_vec second) {
#if BF16
    u32_vec pairs = (u32_vec)first >> 16 | ((u32_vec)second & 0xffff0000);
    if (kind != INT8_UNSCALED) {
#if defined(__AVX512BF16__)
        const u32_vec lane = LANE_INDEX, places = lane * 0x10001 + 0x100000;
        const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
        pairs = (u32_vec)_mm512_permutexvar_epi16((__m512i)places, both);
#else
        pairs = __builtin_convertvector(to_bf16(first), u32_vec) | __builtin_convertvector(to_bf16(second), u32_vec) << 16;
#endif
    }
    memcpy(to, &pairs, sizeof pairs);
#else
    store(to, first);
    store(to + TILE_N, second);
#endif
}

/* How far a tile of the weight is dequantized. */
typedef struct {
    const packed_codes *packed;
    const uint8_t *codes;
    int64_t tile, at, first, group, group_end; /* the next input, output of the tile and group */
    int64_t end, interval; /* inputs that may be dequantized; steps of a product for each HALF_BLOCK of them, less 1 */
    scalar_t *weights;     /* [(last + 1) / PAIR, TILE_N, PAIR]: the last inputs, packed as `gemm` has them */
    int64_t last;
} dequant_state;

/* Dequantizes HALF_BLOCK inputs of LANES outputs. */
INLINE void dequantize_some(const int kind, dequant_state *w) {
    const int bits = code_bits(kind);
    const packed_codes *packed = w->packed;
    const uint8_t *codes = w->codes + w->at * TILE_N * bits / 8 + w->first * 4;
    scalar_t *to = w->weights + (w->at & w->last) * TILE_N + w->first * PAIR;
    f32_vec scale = broadcast(1.0f), offset = {0};
    if (!has_one_scale(packed)) scale = load_group(packed, w->tile, w->group, 0, w->first);
    if (packed->has_offset) offset = load_group(packed, w->tile, w->group, 1, w->first);
    if (!has_one_scale(packed)) __builtin_prefetch(group_at(packed, w->tile, w->group + GROUPS_AHEAD, 0, 0) + w->first * 4);
#pragma GCC unroll 4
    for (int quad = 0; quad < HALF_BLOCK / 4; quad++) {
        const u32_vec four = load_u32(codes + (bits == 8 ? quad : quad / 2) * TILE_N * 4);
        if (bits == 8 || quad % 2 == 0) __builtin_prefetch(codes + (bits == 8 ? quad : quad / 2) * TILE_N * 4 + 4 * CODES_AHEAD);
        f32_vec x[4];
        for (int i = 0; i < 4; i++) {
            x[i] = values_of(kind, four, 8 * (i == 1 ? 2 : i == 2 ? 1 : i) + (bits == 4 ? 4 * (quad % 2) : 0));
            if (kind != INT8_UNSCALED) x[i] = fma_vec(x[i], scale, offset);
        }
        for (int i = 0; i < 4; i += 2) store_two(kind, to + (4 * quad + i) * TILE_N, x[i], x[i + 1]);
    }
    w->first += LANES;
    if (w->first < TILE_N) return;
    w->first = 0, w->at += HALF_BLOCK;
    if (w->at == w->group_end) w->group++, w->group_end += packed->group_size;
}

/* One block of a product: sums [rows, TILE_N] += x [rows, steps * PAIR] * weights [steps, TILE_N, PAIR]. Meanwhile it
   continues `dequant`, or fetches `next`, `next_step` bytes with each step. */
INLINE void multiply_rows(
    const int rows, const int kind, dequant_state *dequant, const operand_t *x, int64_t x_stride, const packed_t *weights,
    int64_t steps, float *sums, const char *next, int64_t next_step
) {
    for (int first = 0; first < TILE_N; first += VECTORS * LANES) {
        f32_vec tile[TILE_M][VECTORS];
#pragma GCC unroll 8
        for (int row = 0; row < rows; row++)
            for (int i = 0; i < VECTORS; i++) tile[row][i] = load_f32(sums + row * TILE_N + first + i * LANES);
        for (int64_t step = 0; step < steps; step++) {
            if (kind != PLAIN) {
                if ((step & dequant->interval) == 0 && dequant->at < dequant->end) dequantize_some(kind, dequant);
            } else if (first == 0) {
                __builtin_prefetch(next + step * next_step);
                __builtin_prefetch(next + step * next_step + CACHE_LINE);
            }
#pragma GCC unroll 2
            for (int turn = 0; turn < TURNS; turn++)
#pragma GCC unroll 8
                for (int row = 0; row < rows; row++)
                    for (int i = 0; i < VECTORS; i++) {
                        const packed_t *w = weights + (step * TILE_N + first + i * LANES) * PAIR;
                        tile[row][i] = multiply_add(tile[row][i], x + row * x_stride + step * PAIR, w, turn);
                    }
        }
#pragma GCC unroll 8
        for (int row = 0; row < rows; row++)
            for (int i = 0; i < VECTORS; i++) store_f32(sums + row * TILE_N + first + i * LANES, tile[row][i]);
    }
}

/* The same for any number of rows up to TILE_M. */
INLINE void multiply_any_rows(
    int64_t rows, const int kind, dequant_state *dequant, const scalar_t *x, int64_t x_stride, const packed_t *weights,
    int64_t steps, float *sums, const char *next, int64_t next_step
) {
#if WIDENS
    float wide[TILE_M * BLOCK_STEPS * PAIR];
    for (int64_t row = 0; row < rows; row++)
        for (int64_t i = 0; i < steps * PAIR; i += LANES)
            store_f32(wide + row * BLOCK_STEPS * PAIR + i, load_partial(x + row * x_stride + i, steps * PAIR - i));
    const int64_t stride = BLOCK_STEPS * PAIR;
#else
    const scalar_t *wide = x;
    const int64_t stride = x_stride;
#endif
#define ROWS(count) \
    case count: return multiply_rows(count, kind, dequant, wide, stride, weights, steps, sums, next, next_step);
    switch (rows) {
        ROWS(1) ROWS(2) ROWS(3) ROWS(4) ROWS(5) ROWS(6)
#if TILE_M > 6
        ROWS(7) ROWS(8)
#endif
    }
}

static __attribute__((noinline)) void multiply_block(
    int64_t rows, const scalar_t *x, int64_t x_stride, const packed_t *weights, int64_t steps, float *sums,
    const char *next, int64_t next_step
) {
    multiply_any_rows(rows, PLAIN, NULL, x, x_stride, weights, steps, sums, next, next_step);
}

#endif
