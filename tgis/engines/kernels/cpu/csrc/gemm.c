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

#define WIDENED_GROUPS 4 /* of a weight in codes, at a time: they stay in the L1 cache */

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

/* Outputs of one tile for the rows [first, last), by a weight in codes: a block of it after the other is widened. */
static void multiply_widened(const gemm_args *args, const packed_codes *packed, int64_t first, int64_t last, int64_t tile) {
    const int64_t rows = last - first;
    float sums[CHUNK_M][TILE_N];
    load_bias(args, tile, sums[0]);
    if (!packed->ranges) memset(sums[0], 0, sizeof sums[0]);
    for (int64_t row = 1; row < rows; row++) memcpy(sums[row], sums[0], sizeof sums[0]);
    for (int64_t start = 0; start < args->k; start += WIDENED_GROUPS * GROUP) {
        scalar_t weights[WIDENED_GROUPS * GROUP * TILE_N];
        for (int64_t i = start; i < min_i64(start + WIDENED_GROUPS * GROUP, args->k); i += GROUP)
            if (packed->ranges) widen_group(4, packed, tile, i / GROUP, weights + (i - start) * TILE_N);
            else widen_group(8, packed, tile, i / GROUP, weights + (i - start) * TILE_N);
        const int64_t steps = min_i64(args->k - start, WIDENED_GROUPS * GROUP) / PAIR;
        for (int64_t row = 0; row < rows; row += TILE_M)
            multiply_block(
                min_i64(rows - row, TILE_M), args->x + (first + row) * args->k + start, args->k, weights, steps, sums[row],
                (const char *)weights, 0
            );
    }
    float bias[TILE_N];
    load_bias(args, tile, bias);
    for (int64_t row = 0; row < rows; row++) {
        for (int i = 0; !packed->ranges && i < TILE_N; i++) sums[row][i] = sums[row][i] * packed->scale[tile * TILE_N + i] + bias[i];
        store_sums(args, first + row, tile, sums[row]);
    }
}

/* `gemm` with the codes of quantized_gemm.c; k is a multiple of PAIR. */
void EXPORT(widened_gemm)(
    const scalar_t *x, const uint8_t *codes, const uint16_t *ranges, const float *scale, const scalar_t *bias, scalar_t *y,
    int64_t m, int64_t k, int64_t n, int64_t threads
) {
    const gemm_args args = {x, NULL, bias, y, m, k, n};
    const packed_codes packed = {codes, ranges, scale, (k + GROUP - 1) / GROUP};
    const int64_t tiles = (n + TILE_N - 1) / TILE_N, chunks = (m + CHUNK_M - 1) / CHUNK_M;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t unit = 0; unit < tiles * chunks; unit++) {
        const int64_t first = unit % chunks * CHUNK_M;
        multiply_widened(&args, &packed, first, min_i64(first + CHUNK_M, m), unit / chunks);
    }
}
