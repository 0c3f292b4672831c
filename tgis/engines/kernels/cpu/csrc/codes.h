/* Weights in codes of 8 bits, (code - 128) * scale of the output, or of 4 bits, code * scale + offset of the output and
   group of GROUP inputs.

   Packed codes are [n / TILE_N, k / 4, TILE_N, 4] bytes, n and k filled up. The two in the middle of four are exchanged.
   With 4 bits a byte has the codes of the next four inputs, too, in its upper half. */

#ifndef CODES_H
#define CODES_H

#include "gemm.h"

#define GROUP 32         /* as in quantized.py */
#define CODES_AHEAD 4096 /* bytes that are fetched ahead */

typedef int32_t i32_vec __attribute__((vector_size(4 * LANES)));

typedef struct {
    const uint8_t *codes;
    const uint16_t *ranges; /* of 4 bits: bfloat16 [n / TILE_N, groups, 2, TILE_N], scales and offsets */
    const float *scale;     /* of 8 bits: [n], filled up */
    int64_t groups;
} packed_codes;

static inline u32_vec load_u32(const uint8_t *from) {
    u32_vec x;
    memcpy(&x, from, sizeof x);
    return x;
}

/* LANES scales (`which` 0) or offsets (1) of a group, from output `first` of the tile on. */
static inline f32_vec load_range(const packed_codes *packed, int64_t tile, int64_t group, int which, int64_t first) {
    u16_vec bits;
    memcpy(&bits, packed->ranges + ((tile * packed->groups + group) * 2 + which) * TILE_N + first, sizeof bits);
    return (f32_vec)(__builtin_convertvector(bits, u32_vec) << 16);
}

static inline const uint8_t *codes_of_group(const packed_codes *packed, int bits, int64_t tile, int64_t group) {
    return packed->codes + (tile * packed->groups + group) * GROUP * TILE_N * bits / 8;
}

/* Codes of the four inputs from 4 * `quad` of a group on, for LANES outputs from `first` on: a byte each. */
static inline u32_vec load_quad(const uint8_t *group, int bits, int quad, int64_t first) {
    const u32_vec found = load_u32(group + ((bits == 8 ? quad : quad / 2) * TILE_N + first) * 4);
    return bits == 8 ? found : (found >> 4 * (quad % 2)) & 0x0f0f0f0f;
}

/* The weights of a group as gemm.c has them, with 8 bits without their scale, and exact; with 4 bits rounded to
   scalar_t. */
static inline __attribute__((always_inline)) void widen_group(
    const int bits, const packed_codes *packed, int64_t tile, int64_t group, scalar_t *weights
) {
    const uint8_t *codes = codes_of_group(packed, bits, tile, group);
    for (int64_t first = 0; first < TILE_N; first += LANES) {
        f32_vec scale = {0}, offset = {0};
        if (bits == 4) scale = load_range(packed, tile, group, 0, first), offset = load_range(packed, tile, group, 1, first);
#pragma GCC unroll 8
        for (int quad = 0; quad < GROUP / 4; quad++) {
            const u32_vec four = load_quad(codes, bits, quad, first);
            __builtin_prefetch(codes + (quad * TILE_N + first) * bits / 2 + CODES_AHEAD);
            u32_vec wide[4];
            for (int i = 0; i < 4; i++) {
                const int byte = i == 1 ? 2 : i == 2 ? 1 : i;
                f32_vec x = __builtin_convertvector((i32_vec)((four >> 8 * byte) & 0xff), f32_vec);
                x = bits == 4 ? x * scale + offset : x - 128.0f; /* the product is exact */
                wide[i] = (u32_vec)x;
            }
            for (int i = 0; i < 4; i += PAIR) {
                u32_vec stored = wide[i];
#if BF16
                for (int half = 0; half < 2 && bits == 4; half++) wide[i + half] += 0x7fff + ((wide[i + half] >> 16) & 1); /* to even */
                stored = wide[i] >> 16 | (wide[i + 1] & 0xffff0000);
#endif
                memcpy(weights + ((4 * quad + i) / PAIR * TILE_N + first) * PAIR, &stored, sizeof stored);
            }
        }
    }
}

#endif
