/* The rows of mixtures of experts, sorted by expert, and the linear layers of all experts as one weight. */

#ifndef EXPERTS_H
#define EXPERTS_H

#include "codes.h"

#define EXPERT_ALIGNMENT 8 /* rows of an expert begin at a multiple: TILE_M of quantized_gemm.c divides it */
#define EXPERT_ROWS 64     /* rows that a thread takes at a time, a multiple of all TILE_M of quantized_gemm.c */

/* Some rows of an expert: [first, last) of the sorted ones. */
typedef struct {
    int64_t expert, first, last;
    int64_t begin, count; /* the blocks of the same expert */
} expert_block;

/* A linear layer of the sorted rows: y [num_rows, n] = x [num_rows, k] times the weight of the expert of each row. */
typedef struct expert_layer {
    void (*multiply)(const struct expert_layer *layer, const expert_block *rows, int64_t tile); /* one tile of outputs */
    void (*quantize)(const struct expert_layer *layer, int64_t row); /* for the former; or NULL */
    const void *weight;   /* packed, [experts * n, k], or its packed_codes */
    const scalar_t *bias; /* [experts * n] or NULL */
    int64_t k, n;         /* n is a multiple of TILE_N */
    const scalar_t *x;
    scalar_t *y;
    char *codes; /* of x: 4 bytes for each padded input */
    int64_t num_rows;
} expert_layer;

static inline const scalar_t *expert_bias(const expert_layer *layer, int64_t expert) {
    return layer->bias ? layer->bias + expert * layer->n : NULL;
}

/* The codes of one expert. */
static inline packed_codes expert_codes(const expert_layer *layer, int64_t expert) {
    packed_codes codes = *(const packed_codes *)layer->weight;
    codes.codes += expert * layer->n * padded_inputs(layer->k) * code_bits(codes.kind) / 8;
    codes.groups = group_at(&codes, expert * layer->n / TILE_N, 0, 0, 0);
    return codes;
}

#endif
