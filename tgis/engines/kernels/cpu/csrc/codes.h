/* Weights in codes of 4 or 8 bits: the value of the code * scale + offset of the output and group of inputs.

   Packed codes are [n / TILE_N, k / 4, TILE_N, 4] bytes, n filled up and k to a multiple of BLOCK. The two in the middle of
   four are exchanged. With 4 bits a byte has the codes of the next four inputs, too, in its upper half. */

#ifndef CODES_H
#define CODES_H

#include "gemm.h"

#define BLOCK 32         /* inputs with one scale in activations: GROUP of weight.py */
#define HALF_BLOCK 16    /* inputs: the size of a group of the weight is a multiple */
#define CODES_AHEAD 4096 /* bytes that are fetched ahead */
#define GROUPS_AHEAD 32  /* the same */

enum { INT4, INT8, E4M3, E2M1 }; /* values of codes: the code; the code less 128; the float of these bits, of 8 or 4 */

typedef struct {
    const uint8_t *codes;
    const void *groups;       /* [n / TILE_N, groups, 1 or 2, TILE_N]: scales and, if there are any, offsets */
    int64_t kind, group_size; /* the latter in inputs */
    int64_t num_groups, has_offset, in_bf16;
    int64_t per_block;        /* whether x has a scale for each row and BLOCK inputs, or for each row */
    float steps, scale;       /* of x, see weight.py; 0: none */
    int64_t may_use_amx;      /* with INT8: whether the CPU has it and the system allows it */
} packed_codes;

static inline int code_bits(int64_t kind) { return kind == INT4 || kind == E2M1 ? 4 : 8; }

static inline int64_t padded_inputs(int64_t k) { return (k + BLOCK - 1) / BLOCK * BLOCK; }

/* The scales (`which` 0) or offsets (1) of a group, from output `first` of the tile on. */
INLINE const void *group_at(const packed_codes *weight, int64_t tile, int64_t group, int which, int64_t first) {
    const int64_t at = ((tile * weight->num_groups + group) * (1 + weight->has_offset) + which) * TILE_N + first;
    return (const char *)weight->groups + at * (weight->in_bf16 ? 2 : 4);
}

/* LANES of them. */
INLINE f32_vec load_group(const packed_codes *weight, int64_t tile, int64_t group, int which, int64_t first) {
    const void *from = group_at(weight, tile, group, which, first);
    return weight->in_bf16 ? load_bf16(from) : load_f32(from);
}

/* Whether each output has one scale and nothing else, by which its sum can be multiplied. */
static inline int has_one_scale(const packed_codes *weight) { return weight->num_groups == 1 && !weight->has_offset; }

#endif
