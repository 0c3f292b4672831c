/* Linear layers as in gemm.c with a weight in codes, which becomes scalar_t in parts of some inputs. */

#include "experts.h"
#include "gemm_rows.h"

#define DEQUANT_M (16 * TILE_M) /* rows that a thread takes at a time */

/* Outputs of one tile for the rows [first, last), by a weight in codes: one part of it after the other is dequantized, some
   of the next one during the products of each tile of rows. Where there is one scale for each output, it multiplies sums. */
INLINE void multiply_dequantized(
    const int kind, const gemm_args *args, const packed_codes *packed, int64_t first, int64_t last, int64_t tile
) {
    const int64_t rows = last - first, inputs = padded_inputs(args->k), late = has_one_scale(packed);
    float sums[DEQUANT_M][TILE_N], bias[TILE_N];
    load_bias(args, tile, bias);
    for (int64_t row = 0; row < rows; row++)
        if (late) memset(sums[row], 0, sizeof bias);
        else memcpy(sums[row], bias, sizeof bias);
    scalar_t dequantized[2 * DEQUANT_INPUTS * TILE_N];
    const uint8_t *codes = packed->codes + tile * inputs * TILE_N * code_bits(kind) / 8;
    const int64_t part = OVERLAP_DEQUANT && rows <= 2 * TILE_M ? DEQUANT_INPUTS / 2 : DEQUANT_INPUTS;
    const int64_t interval = (rows > 3 * TILE_M ? 4 : rows > TILE_M ? 2 : 1) * (HALF_BLOCK / 4) - 1;
    dequant_state next = {
        packed, codes, tile, .group_end = packed->group_size, .interval = interval, .weights = dequantized, .last = 2 * part - 1
    };
    for (int64_t start = 0; start < inputs; start += part) {
        const int64_t end = min_i64(start + part, inputs);
        while (next.at < end) dequantize_some(kind, &next);
        next.end = min_i64(end + part, inputs);
        const int64_t steps = (min_i64(args->k, end) - start) / PAIR;
        const scalar_t *weights = dequantized + (start & next.last) * TILE_N, *x = args->x + first * args->k + start;
        for (int64_t row = 0; row < rows; row += TILE_M, x += TILE_M * args->k) {
            const int64_t count = min_i64(rows - row, TILE_M);
            const char *fetched = (const char *)weights;
            if (OVERLAP_DEQUANT) multiply_any_rows(count, kind, &next, x, args->k, weights, steps, sums[row], fetched, 0);
            else multiply_block(count, x, args->k, weights, steps, sums[row], fetched, 0);
        }
    }
    for (int64_t row = 0; row < rows; row++) {
        for (int i = 0; late && i < TILE_N; i += LANES)
            store_f32(sums[row] + i, fma_vec(load_f32(sums[row] + i), load_group(packed, tile, 0, 0, i), load_f32(bias + i)));
        store_sums(args, first + row, tile, sums[row]);
    }
}

static void multiply_part(const gemm_args *args, const packed_codes *packed, int64_t first, int64_t last, int64_t tile) {
    if (packed->kind == INT4) multiply_dequantized(INT4, args, packed, first, last, tile);
    else if (packed->kind == INT8 && has_one_scale(packed)) multiply_dequantized(INT8_UNSCALED, args, packed, first, last, tile);
    else if (packed->kind == E2M1) multiply_dequantized(E2M1, args, packed, first, last, tile);
    else if (packed->kind == INT8) multiply_dequantized(INT8, args, packed, first, last, tile);
    else multiply_dequantized(E4M3, args, packed, first, last, tile);
}

/* `gemm` with a weight in codes; k is a multiple of PAIR. */
void EXPORT(dequantizing_gemm)(
    const scalar_t *x, const packed_codes *packed, const scalar_t *bias, scalar_t *y, int64_t m, int64_t k, int64_t n,
    int64_t threads
) {
    const gemm_args args = {x, bias, NULL, y, m, k, n};
    const int64_t tiles = (n + TILE_N - 1) / TILE_N, chunks = (m + DEQUANT_M - 1) / DEQUANT_M;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t unit = 0; unit < tiles * chunks; unit++) {
        const int64_t first = unit % chunks * DEQUANT_M;
        const int64_t last = min_i64(first + DEQUANT_M, m), tile = unit / chunks;
        multiply_part(&args, packed, first, last, tile);
    }
}

/* For `multiply` of experts.h. */
void EXPORT(multiply_dequantized_expert)(const expert_layer *layer, const expert_block *rows, int64_t tile) {
    const packed_codes codes = expert_codes(layer, rows->expert);
    const gemm_args args = {layer->x, expert_bias(layer, rows->expert), NULL, layer->y, 0, layer->k, layer->n};
    multiply_part(&args, &codes, rows->first, rows->last, tile);
}
