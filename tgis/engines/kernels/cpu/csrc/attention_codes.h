/* Keys and values as int8 codes: how they are made and widened.

   A panel has its codes, keys [k_size / QUAD, PANEL, QUAD] and values [PANEL / QUAD, v_size, QUAD], then the float32
   scales of its tokens. The numbers of a token and head are code * scale, the largest of them has the largest code. Codes
   are exact in bfloat16. */

#ifndef ATTENTION_CODES_H
#define ATTENTION_CODES_H

#include "attention_tile.h"

#define QUAD 4 /* codes in a lane */
#define SCALE_BYTES ((int64_t)sizeof(float)) /* as in kv_codes.py */
#define LARGEST 127.0f /* of the codes */
#define TINY 1e-30f    /* smaller numbers are 0 */

typedef int32_t i32_vec __attribute__((vector_size(4 * LANES)));

/* A panel, whose place in a cache is counted in tokens of one head. */
static inline const char *panel_of(const void *cache, int64_t is_coded, int64_t size, int64_t slot) {
    return (const char *)cache + slot * (is_coded ? size + SCALE_BYTES : size * (int64_t)sizeof(scalar_t));
}

/* The scale of one of its tokens. */
static inline float *scale_of(char *panel, int64_t size, int64_t token) { return (float *)(panel + PANEL * size) + token; }

/* The keys or values of a panel, codes [quads, width, QUAD], in the order of attention_tile.h, and the scales of its
   tokens; fetches a panel that is needed later. */
static void widen_panel(
    const char *panel, int64_t quads, int64_t width, const char *later, scalar_t *to, float *scales
) {
    for (int64_t quad = 0; quad < quads; quad++)
        for (int64_t first = 0; first < width; first += LANES) {
            u32_vec four, wide[QUAD];
            memcpy(&four, panel + (quad * width + first) * QUAD, sizeof four);
            __builtin_prefetch(later + (quad * width + first) * QUAD);
#pragma GCC unroll 4
            for (int i = 0; i < QUAD; i++)
                wide[i] = (u32_vec)__builtin_convertvector((i32_vec)(four << (24 - 8 * i)) >> 24, f32_vec);
#pragma GCC unroll 4
            for (int i = 0; i < QUAD; i += PAIR) {
                u32_vec stored = wide[i];
#if BF16
                stored = stored >> 16 | (wide[i + 1] & 0xffff0000);
#endif
                memcpy(to + ((quad * QUAD + i) / PAIR * width + first) * PAIR, &stored, sizeof stored);
            }
        }
    memcpy(scales, panel + quads * width * QUAD, PANEL * SCALE_BYTES);
}

/* The codes of the numbers of a token and head, which are divided by `divisors` unless these are NULL. Returns the
   scale; it is not finite if one of the numbers is not. */
static float quantize(const scalar_t *from, int64_t size, const float *divisors, uint8_t *to) {
    float numbers[size];
    uint32_t wide[size];
    u32_vec largest = {0}; /* the bits of absolute values are in the order of these, NaN last */
    for (int64_t i = 0; i < size; i += LANES) {
        const f32_vec x = divisors ? load(from + i) / load_f32(divisors + i) : load(from + i);
        const u32_vec bits = (u32_vec)x & 0x7fffffff, larger = (u32_vec)(bits > largest);
        largest = (larger & bits) | (~larger & largest);
        memcpy(numbers + i, &x, sizeof x);
    }
    for (int lane = 1; lane < LANES; lane++) largest[0] = largest[lane] > largest[0] ? largest[lane] : largest[0];
    const float top = ((f32_vec)largest)[0], factor = top < TINY ? 0 : LARGEST / top;
    for (int64_t i = 0; i < size; i += LANES) {
        /* 1.5 * 2^23: the rounded number moves to the lowest bits */
        const u32_vec code = (u32_vec)(load_f32(numbers + i) * factor + 12582912.0f);
        memcpy(wide + i, &code, sizeof code);
    }
    for (int64_t i = 0; i < size; i++) to[i] = wide[i];
    return top < TINY ? 0 : top / LARGEST;
}

#endif
