/* The arguments of the recurrent layers. */

#pragma once
#include "simd.h"

/* A tensor of three dimensions, the first of which may be missing, with a stride of 0; NULL for none. */
typedef struct {
    const void *data;
    int64_t strides[3], in_f32; /* else it has elements of scalar_t */
} strided;

/* The state before the first of consecutive tokens with the same slot is that of `source`, or zeros if that is -1; after
   the last one it is in `slot`. After a token it is also in `save`, unless that is -1. */
typedef struct {
    int64_t source, slot, save;
} token_slots;

/* Tokens of some sequences, and the states of many; y and states are contiguous. */
typedef struct {
    scalar_t *y;
    void *states;
    const token_slots *slots;
    int64_t tokens, threads;
} flat_batch;

typedef struct {
    flat_batch batch;                   /* states [slots, taps - 1, channels]: the last inputs */
    strided x, weight, bias;            /* [tokens, channels], [taps, channels], [channels] or none */
    int64_t channels, taps, activation; /* the latter as in activations.h, or -1 */
} conv_args;

/* States [slots, heads, key_size * size]: of each head COLUMNS columns after the others, and these row by row. */
typedef struct {
    flat_batch batch;
    strided q, k, v;     /* [tokens, key_heads, key_size], the same, [tokens, heads, size] */
    strided decay, beta; /* [tokens, heads]; the logarithm of the former */
    int64_t key_heads, key_size, heads, size, normalize;
} delta_args;

typedef struct {
    flat_batch batch;      /* states [slots, heads, size, state_size] */
    strided x, dt;         /* [tokens, heads, size] */
    strided a;             /* [heads, size, state_size], in float32; may be one value for each head */
    strided b, c;          /* [tokens, groups, state_size] */
    strided d, dt_bias, z; /* [tokens, heads, size], or none */
    int64_t heads, size, groups, state_size;
    float dt_min, dt_max;
} scan_args;
