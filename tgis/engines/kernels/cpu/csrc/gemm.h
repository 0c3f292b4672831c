/* Packed weights, one layout for all kernels: [n / TILE_N, k / PAIR, TILE_N, PAIR], the last tile filled up with zeros. */

#ifndef GEMM_H
#define GEMM_H

#include "multiply_add.h"

#define TILE_N 32 /* outputs in a tile */

/* The name of a function for packed weights in 16 bits beside float32. */
#if defined(BY_BF16)
#define EXPORT_BY(name) EXPORT(name##_by_bf16)
#elif defined(BY_F16)
#define EXPORT_BY(name) EXPORT(name##_by_f16)
#else
#define EXPORT_BY(name) EXPORT(name)
#endif

typedef struct {
    const scalar_t *x, *bias; /* [m, k]; [n] or NULL */
    const packed_t *weight;
    scalar_t *y; /* [m, n] */
    int64_t m, k, n;
} gemm_args;

/* The outputs of a tile that exist. */
static inline int64_t tile_columns(const gemm_args *args, int64_t tile) { return min_i64(args->n - tile * TILE_N, TILE_N); }

static inline void load_bias(const gemm_args *args, int64_t tile, float bias[TILE_N]) {
    memset(bias, 0, TILE_N * sizeof *bias);
    for (int64_t i = 0, columns = tile_columns(args, tile); args->bias && i < columns; i += LANES)
        store_f32(bias + i, load_partial(args->bias + tile * TILE_N + i, columns - i));
}

static inline void store_sums(const gemm_args *args, int64_t row, int64_t tile, const float sums[TILE_N]) {
    for (int64_t i = 0, columns = tile_columns(args, tile); i < columns; i += LANES)
        store_partial(args->y + row * args->n + tile * TILE_N + i, load_f32(sums + i), columns - i);
}

#endif
