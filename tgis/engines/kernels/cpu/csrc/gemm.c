/* Linear layers: y [m, n] = x [m, k] times a weight [n, k] that was packed for this, plus a bias.

   Sums are in float32, from the bias on in the order of k; in bfloat16 the second of each pair comes before the first.
   What a row of x gives depends neither on the rows beside it nor, where multiply-adds are fused, on the instruction set.
   A weight in 16 bits beside x in float32 gives what the same weight in float32 does. */

#include "experts.h"
#include "gemm_rows.h"

#define CHUNK_M (8 * TILE_M) /* rows that a thread takes at a time */
#define PREFETCH_BYTES 4096  /* how far ahead a single tile of rows fetches the weight */

/* The outputs of one tile for the rows [first, last). A single tile of rows is bound by memory, and fetches the weight a
   little ahead; several find this block in a cache, and each fetches its share of the next one. */
static void multiply_chunk(const gemm_args *args, int64_t first, int64_t last, int64_t tile) {
    const int64_t rows = last - first, row_tiles = (rows + TILE_M - 1) / TILE_M, step_size = TILE_N * PAIR;
    const int64_t next_step = step_size * sizeof(packed_t) / row_tiles;
    const scalar_t *x = args->x + first * args->k;
    const packed_t *weights = args->weight + tile * args->k * TILE_N;
    float sums[CHUNK_M][TILE_N];
    load_bias(args, tile, sums[0]);
    for (int64_t row = 1; row < rows; row++) memcpy(sums[row], sums[0], sizeof sums[0]);
    for (int64_t steps, left = args->k / PAIR; left; left -= steps, x += steps * PAIR, weights += steps * step_size) {
        steps = min_i64(left, BLOCK_STEPS);
        const char *next = (const char *)weights + (row_tiles > 1 ? steps * step_size * (int64_t)sizeof(packed_t) : PREFETCH_BYTES);
        for (int64_t row = 0; row < rows; row += TILE_M, next += steps * next_step)
            multiply_block(
                min_i64(rows - row, TILE_M), x + row * args->k, args->k, weights, steps, sums[row], next, next_step
            );
    }
    for (int64_t row = 0; row < rows; row++) store_sums(args, first + row, tile, sums[row]);
}

void EXPORT_BY(gemm)(
    const scalar_t *x, const packed_t *weight, const scalar_t *bias, scalar_t *y, int64_t m, int64_t k, int64_t n,
    int64_t threads
) {
    const gemm_args args = {x, bias, weight, y, m, k, n};
    const int64_t tiles = (n + TILE_N - 1) / TILE_N, chunks = (m + CHUNK_M - 1) / CHUNK_M;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t unit = 0; unit < tiles * chunks; unit++) {
        const int64_t first = unit % chunks * CHUNK_M;
        multiply_chunk(&args, first, min_i64(first + CHUNK_M, m), unit / chunks);
    }
}

/* For `multiply` of experts.h. */
void EXPORT_BY(multiply_expert)(const expert_layer *layer, const expert_block *rows, int64_t tile) {
    const packed_t *weight = (const packed_t *)layer->weight + rows->expert * layer->n * layer->k;
    const gemm_args args = {layer->x, expert_bias(layer, rows->expert), weight, layer->y, 0, layer->k, layer->n};
    for (int64_t first = rows->first; first < rows->last; first += CHUNK_M)
        multiply_chunk(&args, first, min_i64(first + CHUNK_M, rows->last), tile);
}

/* Rows of a weight as an embedding reads them: y [count, k]; tiles have `tile_n` outputs, and pairs of inputs: 1 in a plain
   table. Returns 0, or 1 if there is no such row. */
int EXPORT_BY(packed_rows)(
    const packed_t *weight, const int64_t *ids, scalar_t *y, int64_t count, int64_t k, int64_t n, int64_t tile_n
) {
    const int64_t inputs = tile_n > 1 ? (k + PAIR - 1) / PAIR * PAIR : k;
    for (int64_t i = 0; i < count; i++, y += k) {
        if (ids[i] < 0 || ids[i] >= n) return 1;
        const packed_t *row = weight + (ids[i] / tile_n * inputs * tile_n + ids[i] % tile_n * PAIR);
        for (int64_t at = 0; at < k; at += PAIR, row += tile_n * PAIR)
            for (int j = 0; j < PAIR && at + j < k; j++) y[at + j] = unpack(row[j]);
    }
    return 0;
}
