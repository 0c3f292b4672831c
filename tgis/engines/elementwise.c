/* Small operators of decoders on CPUs, each in one pass over its numbers: fusing.py says which and has this compiled.

   HALF says whether the numbers are bfloat16 or float32; all else is float32, and is rounded once. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#define ENOUGH 16384 /* numbers that are worth more than one thread */

#if HALF
typedef uint16_t number;
#else
typedef float number;
#endif

static inline float get(number x) {
#if HALF
    const uint32_t bits = (uint32_t)x << 16;
    float wide;
    memcpy(&wide, &bits, sizeof wide);
    return wide;
#else
    return x;
#endif
}

static inline number put(float x) {
#if HALF
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return x != x ? bits >> 16 | 0x40 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16; /* to the nearest, or even */
#else
    return x;
#endif
}

/* y [rows, size] = x / sqrt(mean of the squares of its row + eps) * (weight [size] + offset) */
void norm(
    const number *x, const number *weight, number *y, int64_t rows, int64_t size, float eps, float offset,
    int64_t threads
) {
#pragma omp parallel for schedule(static) num_threads(threads) if (rows > 1 && rows * size >= ENOUGH)
    for (int64_t row = 0; row < rows; row++) {
        const number *from = x + row * size;
        number *to = y + row * size;
        float squares = 0;
#pragma omp simd reduction(+ : squares)
        for (int64_t i = 0; i < size; i++) squares += get(from[i]) * get(from[i]);
        const float factor = 1 / sqrtf(squares / size + eps);
#pragma omp simd
        for (int64_t i = 0; i < size; i++) to[i] = put(get(from[i]) * factor * (get(weight[i]) + offset));
    }
}

/* y = x * cos + (-second half of x, first half of x) * sin; x and y [batch, heads, tokens, size] with the strides
   [batch, heads, tokens] and 1, cos and sin [batch or 1, tokens, size] with the stride `step` of batches. */
void rotate(
    const number *x, const number *cosines, const number *sines, number *y, int64_t batch, int64_t heads,
    int64_t tokens, int64_t size, const int64_t *from, const int64_t *to, int64_t step, int64_t threads
) {
    const int64_t half = size / 2;
#pragma omp parallel for collapse(2) schedule(static) num_threads(threads) if (batch * heads * tokens * size >= ENOUGH)
    for (int64_t b = 0; b < batch; b++)
        for (int64_t t = 0; t < tokens; t++) {
            const number *c = cosines + b * step + t * size, *s = sines + b * step + t * size;
            for (int64_t h = 0; h < heads; h++) {
                const number *in = x + b * from[0] + h * from[1] + t * from[2];
                number *out = y + b * to[0] + h * to[1] + t * to[2];
#pragma omp simd
                for (int64_t i = 0; i < half; i++) {
                    const float first = get(in[i]), second = get(in[i + half]);
                    out[i] = put(first * get(c[i]) - second * get(s[i]));
                    out[i + half] = put(second * get(c[i + half]) + first * get(s[i + half]));
                }
            }
        }
}
