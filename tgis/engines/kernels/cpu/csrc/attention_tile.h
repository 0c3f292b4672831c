/* Pieces of attention over one tile of the KV cache: its layout, and the products of queries, keys and
   values.

   The cache of a layer is made of panels of PANEL tokens, which are multiplied as they are: keys
   [blocks, kv_heads, block_size / PANEL, k_size / PAIR, PANEL, PAIR] and values
   [blocks, kv_heads, block_size / PANEL, PANEL / PAIR, v_size, PAIR].

   A panel of int8 codes has keys [k_size / QUAD, PANEL, QUAD] or values [PANEL / QUAD, v_size, QUAD], then the float32
   scales of its tokens. The values of a token and head are code * scale, the largest of them has the largest code. Codes
   are exact in bfloat16. */

#ifndef ATTENTION_TILE_H
#define ATTENTION_TILE_H

#include "multiply_add.h"

#define PANEL 16 /* tokens; a multiple of LANES and PAIR */
#define TILE 128 /* tokens; a multiple of PANEL */
#define QUAD 4   /* codes in a lane */
#define SCALE_BYTES ((int64_t)sizeof(float)) /* as in kv_codes.py */
#define TILE_PANELS (TILE / PANEL)
#define TILE_VECS (TILE / LANES)

/* How many queries and vectors of tokens or values are computed together: their sums are in registers. */
#define GEMM_ROWS 6
#if defined(__AVX512F__)
#define GEMM_COLUMNS 4
#else
#define GEMM_COLUMNS 2
#endif

/* Where the panel of a token is in a cache, counted in tokens of one head. */
static inline int64_t panel_slot(
    int64_t kv_heads, int64_t block_size, int64_t block, int64_t kv_head, int64_t token_in_block
) {
    return (block * kv_heads + kv_head) * block_size + token_in_block / PANEL * PANEL;
}

/* The panel at a place in a cache. */
static inline const char *panel_of(const void *cache, int64_t is_coded, int64_t size, int64_t slot) {
    return (const char *)cache + slot * (is_coded ? size + SCALE_BYTES : size * (int64_t)sizeof(scalar_t));
}

/* The scale of one of its tokens. */
static inline float *scale_of(char *panel, int64_t size, int64_t token) { return (float *)(panel + PANEL * size) + token; }

/* Panels of one KV head. Unseen values are 0, unseen keys anything. */
typedef struct {
    const scalar_t *keys[TILE_PANELS], *values[TILE_PANELS];
    const float *key_scales, *value_scales; /* of tokens, or NULL */
    int64_t count, next_keys;               /* how far from `keys` those are that are needed next */
} panels;

/* scores [rows, TILE_VECS] = q [rows, k_size] * keys, of `count` panels at least; fetches their values. */
INLINE void score_rows(
    const int rows, const panels *tile, int64_t count, int64_t k_size, const operand_t *q, f32_vec (*scores)[TILE_VECS]
) {
    for (int64_t first = 0; first < count * PANEL / LANES; first += GEMM_COLUMNS) {
        f32_vec sums[GEMM_ROWS][GEMM_COLUMNS] = {0};
        const scalar_t *keys[GEMM_COLUMNS];
        const char *values[GEMM_COLUMNS];
        for (int j = 0; j < GEMM_COLUMNS; j++) {
            const int64_t token = (first + j) * LANES, panel = min_i64(token / PANEL, count - 1);
            keys[j] = tile->keys[panel] + token % PANEL * PAIR;
            values[j] = (const char *)tile->values[panel];
        }
        for (int64_t step = 0; step < k_size / PAIR; step++) {
#pragma GCC unroll 8
            for (int j = 0; j < GEMM_COLUMNS && !tile->key_scales; j++) __builtin_prefetch(values[j] + step * CACHE_LINE);
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
                for (int j = 0; j < GEMM_COLUMNS; j++)
                    sums[r][j] = multiply_add(sums[r][j], q + r * k_size + step * PAIR, keys[j] + step * PANEL * PAIR, 0);
        }
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
            for (int j = 0; j < GEMM_COLUMNS; j++) scores[r][first + j] = sums[r][j];
    }
}

/* `columns` vectors of sums [rows, v_size] = sums * shrink [rows] + weights [rows, tokens] * values, from column `first`
   on; fetches the next keys. */
INLINE void weigh_columns(
    const int rows, const int columns, const panels *tile, int64_t count, int64_t v_size, int64_t first,
    const operand_t (*weights)[TILE], const float *shrink, f32_vec *sums, int64_t sums_row
) {
    f32_vec own[GEMM_ROWS][GEMM_COLUMNS];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int j = 0; j < columns; j++) own[r][j] = sums[r * sums_row + first + j] * shrink[r];
    for (int64_t panel = 0; panel < count; panel++)
        for (int64_t step = 0; step < PANEL / PAIR; step++) {
            const int64_t offset = (step * v_size + first * LANES) * PAIR;
            const scalar_t *values = tile->values[panel] + offset, *next = tile->keys[panel] + tile->next_keys + offset;
#pragma GCC unroll 8
            for (int j = 0; j < columns && !tile->key_scales; j++) __builtin_prefetch(next + j * LANES * PAIR);
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
                for (int j = 0; j < columns; j++)
                    own[r][j] = multiply_add(own[r][j], weights[r] + panel * PANEL + step * PAIR, values + j * LANES * PAIR, 0);
        }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int j = 0; j < columns; j++) sums[r * sums_row + first + j] = own[r][j];
}

/* All columns of it. */
INLINE void weigh_rows(
    const int rows, const panels *tile, int64_t count, int64_t v_size, const operand_t (*weights)[TILE],
    const float *shrink, f32_vec *sums, int64_t sums_row
) {
    int64_t first = 0;
    for (; first + GEMM_COLUMNS <= v_size / LANES; first += GEMM_COLUMNS)
        weigh_columns(rows, GEMM_COLUMNS, tile, count, v_size, first, weights, shrink, sums, sums_row);
    for (; first < v_size / LANES; first++)
        weigh_columns(rows, 1, tile, count, v_size, first, weights, shrink, sums, sums_row);
}

#endif
