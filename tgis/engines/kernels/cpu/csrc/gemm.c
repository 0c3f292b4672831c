/* Linear layers: y [m, n] = x [m, k] times a weight [n, k] that was packed for this, plus a bias.

   Sums are in float32, from the bias on in the order of k, the second of each pair before the first: what a row of x
   gives depends neither on the rows beside it nor, where multiply-adds are fused, on the instruction set. */

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
#define CHUNK_M (8 * TILE_M) /* rows that a thread takes at a time */
#define PREFETCH_BYTES 4096  /* how far ahead a single tile of rows fetches the weight */

/* Steps along k of a block. Where it is read several times, it has to stay in the L1 cache. */
#define BLOCK_STEPS (WIDENS || VECTORS * LANES < TILE_N ? 8192 / (TILE_N * PAIR * (int)sizeof(scalar_t)) : 1 << 20)

#define WIDENED_INPUTS 128 /* of a weight in codes, at a time: they stay in the L1 cache */

/* One block of a product: sums [rows, TILE_N] += x [rows, steps * PAIR] * weights [steps, TILE_N, PAIR]. Meanwhile it
   fetches `next`, `next_step` bytes with each step. */
static inline __attribute__((always_inline)) void multiply_rows(
    const int rows, const operand_t *x, int64_t x_stride, const scalar_t *weights, int64_t steps, float *sums,
    const char *next, int64_t next_step
) {
    for (int first = 0; first < TILE_N; first += VECTORS * LANES) {
        f32_vec tile[TILE_M][VECTORS];
#pragma GCC unroll 8
        for (int row = 0; row < rows; row++)
            for (int i = 0; i < VECTORS; i++) memcpy(&tile[row][i], sums + row * TILE_N + first + i * LANES, sizeof(f32_vec));
        for (int64_t step = 0; step < steps; step++) {
            if (first == 0) {
                __builtin_prefetch(next + step * next_step);
                __builtin_prefetch(next + step * next_step + CACHE_LINE);
            }
#pragma GCC unroll 8
            for (int row = 0; row < rows; row++)
                for (int i = 0; i < VECTORS; i++) {
                    const scalar_t *w = weights + (step * TILE_N + first + i * LANES) * PAIR;
                    tile[row][i] = multiply_add(tile[row][i], x + row * x_stride + step * PAIR, w);
                }
        }
#pragma GCC unroll 8
        for (int row = 0; row < rows; row++)
            for (int i = 0; i < VECTORS; i++) memcpy(sums + row * TILE_N + first + i * LANES, &tile[row][i], sizeof(f32_vec));
    }
}

/* The same for any number of rows up to TILE_M. */
static void multiply_block(
    int64_t rows, const scalar_t *x, int64_t x_stride, const scalar_t *weights, int64_t steps, float *sums,
    const char *next, int64_t next_step
) {
#if WIDENS
    float wide[TILE_M * BLOCK_STEPS * PAIR];
    for (int64_t row = 0; row < rows; row++)
        for (int64_t i = 0; i < steps * PAIR; i += LANES) {
            const f32_vec part = load_partial(x + row * x_stride + i, steps * PAIR - i);
            memcpy(wide + row * BLOCK_STEPS * PAIR + i, &part, sizeof part);
        }
    const int64_t stride = BLOCK_STEPS * PAIR;
#else
    const scalar_t *wide = x;
    const int64_t stride = x_stride;
#endif
#define ROWS(count) \
    case count: return multiply_rows(count, wide, stride, weights, steps, sums, next, next_step);
    switch (rows) {
        ROWS(1) ROWS(2) ROWS(3) ROWS(4) ROWS(5) ROWS(6)
#if TILE_M > 6
        ROWS(7) ROWS(8)
#endif
    }
}

/* The outputs of one tile for the rows [first, last). A single tile of rows is bound by memory, and fetches the weight a
   little ahead; several find this block in a cache, and each fetches its share of the next one. */
static void multiply_chunk(const gemm_args *args, int64_t first, int64_t last, int64_t tile) {
    const int64_t rows = last - first, row_tiles = (rows + TILE_M - 1) / TILE_M, step_size = TILE_N * PAIR;
    const int64_t next_step = step_size * sizeof(scalar_t) / row_tiles;
    const scalar_t *x = args->x + first * args->k, *weights = args->weight + tile * args->k * TILE_N;
    float sums[CHUNK_M][TILE_N];
    load_bias(args, tile, sums[0]);
    for (int64_t row = 1; row < rows; row++) memcpy(sums[row], sums[0], sizeof sums[0]);
    for (int64_t steps, left = args->k / PAIR; left; left -= steps, x += steps * PAIR, weights += steps * step_size) {
        steps = min_i64(left, BLOCK_STEPS);
        const char *next = (const char *)weights + (row_tiles > 1 ? steps * step_size * (int64_t)sizeof(scalar_t) : PREFETCH_BYTES);
        for (int64_t row = 0; row < rows; row += TILE_M, next += steps * next_step)
            multiply_block(
                min_i64(rows - row, TILE_M), x + row * args->k, args->k, weights, steps, sums[row], next, next_step
            );
    }
    for (int64_t row = 0; row < rows; row++) store_sums(args, first + row, tile, sums[row]);
}

void EXPORT(gemm)(
    const scalar_t *x, const scalar_t *weight, const scalar_t *bias, scalar_t *y, int64_t m, int64_t k, int64_t n,
    int64_t threads
) {
    const gemm_args args = {x, weight, bias, y, m, k, n};
    const int64_t tiles = (n + TILE_N - 1) / TILE_N, chunks = (m + CHUNK_M - 1) / CHUNK_M;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t unit = 0; unit < tiles * chunks; unit++) {
        const int64_t first = unit % chunks * CHUNK_M;
        multiply_chunk(&args, first, min_i64(first + CHUNK_M, m), unit / chunks);
    }
}

/* LANES numbers of a table: for the codes in the lowest bits of each lane, whatever is above them. */
static inline __attribute__((always_inline)) f32_vec look_up(const int kind, const float *table, u32_vec codes) {
    if (kind == INT8) return __builtin_convertvector((i32_vec)(codes & 0xff), f32_vec) - 128.0f;
    if (kind == E4M3) {
        /* Exponents get a bias of 127 in place of 7. With the lowest one there is no leading 1: it is subtracted. */
        const u32_vec size = codes & 0x7f, is_tiny = (u32_vec)(size < 8), is_nan = (u32_vec)(size == 0x7f);
        const f32_vec found = (f32_vec)((size << 20) + 0x3c000000 + (is_tiny & 0x00800000)) - (f32_vec)(is_tiny & 0x3c800000);
        return (f32_vec)((u32_vec)found | (codes & 0x80) << 24 | is_nan);
    }
#if defined(__AVX512F__)
    return (f32_vec)_mm512_permutexvar_ps((__m512i)codes, _mm512_loadu_ps(table));
#elif defined(__AVX2__)
    const __m256 low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table), (__m256i)codes);
    const __m256 high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table + 8), (__m256i)codes);
    return (f32_vec)_mm256_blendv_ps(low, high, (__m256)(codes << 28));
#else
    f32_vec found;
    for (int lane = 0; lane < LANES; lane++) found[lane] = table[codes[lane] & 15];
    return found;
#endif
}

/* Two inputs by LANES outputs as packed weights have them. */
static inline void store_two(scalar_t *to, f32_vec first, f32_vec second) {
#if BF16 && defined(__AVX512BF16__)
    const u32_vec lane = LANE_INDEX, places = lane * 0x10001 + 0x100000;
    const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
    _mm512_storeu_si512(to, _mm512_permutexvar_epi16((__m512i)places, both));
#elif BF16
    const u32_vec low = __builtin_convertvector(to_bf16(first), u32_vec), high = __builtin_convertvector(to_bf16(second), u32_vec);
    const u32_vec pairs = low | high << 16;
    memcpy(to, &pairs, sizeof pairs);
#else
    store(to, first);
    store(to + TILE_N, second);
#endif
}

/* The weights of inputs from `at` to `end` as gemm.c has them. */
static inline __attribute__((always_inline)) void widen(
    const int kind, const packed_codes *packed, int64_t inputs, int64_t tile, int64_t at, int64_t end, scalar_t *weights
) {
    const int bits = kind == TABLE ? 4 : 8;
    for (const uint8_t *codes = packed->codes + (tile * inputs + at) * TILE_N * bits / 8; at < end; at += UNIT)
        for (int first = 0; first < TILE_N; first += LANES) {
            f32_vec scale = (f32_vec){0} + 1.0f, offset = {0};
            if (!has_one_scale(packed)) scale = load_range(packed, tile, at / packed->range, 0, first);
            if (packed->has_offset) offset = load_range(packed, tile, at / packed->range, 1, first);
#pragma GCC unroll 4
            for (int quad = 0; quad < UNIT / 4; quad++) {
                u32_vec four = load_u32(codes + ((bits == 8 ? quad : quad / 2) * TILE_N + first) * 4);
                if (bits == 4) four >>= 4 * (quad % 2);
                f32_vec x[4];
                for (int i = 0; i < 4; i++)
                    x[i] = fma_vec(look_up(kind, packed->table, four >> 8 * (i == 1 ? 2 : i == 2 ? 1 : i)), scale, offset);
                for (int i = 0; i < 4; i += 2) store_two(weights + (4 * quad + i) * TILE_N + first * PAIR, x[i], x[i + 1]);
                __builtin_prefetch(codes + (quad * TILE_N + first) * bits / 2 + CODES_AHEAD);
            }
            if (first + LANES == TILE_N) codes += UNIT * TILE_N * bits / 8, weights += UNIT * TILE_N;
        }
}

/* Outputs of one tile for the rows [first, last), by a weight in codes: a block of it after the other is widened. Where
   there is one scale for each output, it multiplies the sums. */
static void multiply_widened(const gemm_args *args, const packed_codes *packed, int64_t first, int64_t last, int64_t tile) {
    const int64_t rows = last - first, inputs = padded_inputs(args->k), late = has_one_scale(packed);
    float sums[CHUNK_M][TILE_N], bias[TILE_N];
    load_bias(args, tile, bias);
    for (int64_t row = 0; row < rows; row++)
        if (late) memset(sums[row], 0, sizeof bias);
        else memcpy(sums[row], bias, sizeof bias);
    for (int64_t start = 0; start < inputs; start += WIDENED_INPUTS) {
        scalar_t weights[WIDENED_INPUTS * TILE_N];
        const int64_t end = min_i64(start + WIDENED_INPUTS, inputs);
        if (packed->kind == TABLE) widen(TABLE, packed, inputs, tile, start, end, weights);
        else if (packed->kind == INT8) widen(INT8, packed, inputs, tile, start, end, weights);
        else widen(E4M3, packed, inputs, tile, start, end, weights);
        const int64_t steps = (min_i64(args->k, end) - start) / PAIR;
        for (int64_t row = 0; row < rows; row += TILE_M)
            multiply_block(
                min_i64(rows - row, TILE_M), args->x + (first + row) * args->k + start, args->k, weights, steps, sums[row],
                (const char *)weights, 0
            );
    }
    for (int64_t row = 0; row < rows; row++) {
        for (int i = 0; late && i < TILE_N; i += LANES) {
            const f32_vec y = fma_vec(load_f32(sums[row] + i), load_range(packed, tile, 0, 0, i), load_f32(bias + i));
            memcpy(sums[row] + i, &y, sizeof y);
        }
        store_sums(args, first + row, tile, sums[row]);
    }
}

/* `gemm` with a weight in codes; k is a multiple of PAIR. */
void EXPORT(widened_gemm)(
    const scalar_t *x, const packed_codes *packed, const scalar_t *bias, scalar_t *y, int64_t m, int64_t k, int64_t n,
    int64_t threads
) {
    const gemm_args args = {x, NULL, bias, y, m, k, n};
    const int64_t tiles = (n + TILE_N - 1) / TILE_N, chunks = (m + CHUNK_M - 1) / CHUNK_M;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t unit = 0; unit < tiles * chunks; unit++) {
        const int64_t first = unit % chunks * CHUNK_M;
        multiply_widened(&args, packed, first, min_i64(first + CHUNK_M, m), unit / chunks);
    }
}
