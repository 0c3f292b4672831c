/* Small operators of decoders on CPUs, each in one pass over its numbers: fusing.py says which and has this compiled.

   HALF says whether the numbers are bfloat16 or float32; all else is float32, and is rounded once. */

#include <math.h>

#include "lanes.h"

#define ENOUGH 16384 /* numbers that are worth more than one thread */

/* y [rows, size] = x / sqrt(mean of the squares of its row + eps) * (weight [size] + offset) */
void norm(
    const number *x, const number *weight, number *y, int64_t rows, int64_t size, float eps, float offset,
    int64_t threads
) {
#pragma omp parallel for schedule(static) num_threads(threads) if (rows > 1 && rows * size >= ENOUGH)
    for (int64_t row = 0; row < rows; row++) {
        const number *from = x + row * size;
        wide squares = {0};
        for (int64_t i = 0; i < size; i += LANES) {
            const wide part = load_some(from + i, size - i);
            squares += part * part;
        }
        const float factor = 1 / sqrtf(sum(squares) / size + eps);
        for (int64_t i = 0; i < size; i += LANES) {
            const wide scale = load_some(weight + i, size - i) + offset;
            store_some(y + row * size + i, load_some(from + i, size - i) * factor * scale, size - i);
        }
    }
}

/* A tensor [batch, heads, tokens, width], where it goes, and the strides of both but that of the last dimension, 1. */
typedef struct {
    const number *x;
    number *y;
    int64_t heads, width, from[3], to[3];
} states;

static void rotate_token(const states *w, int64_t b, int64_t t, int64_t size, const number *c, const number *s) {
    const int64_t half = size / 2;
    for (int64_t h = 0; h < w->heads; h++) {
        const number *first = w->x + b * w->from[0] + h * w->from[1] + t * w->from[2], *second = first + half;
        number *out = w->y + b * w->to[0] + h * w->to[1] + t * w->to[2];
        for (int64_t i = 0; i < half; i += LANES) {
            const int64_t count = half - i;
            const wide a = load_some(first + i, count), z = load_some(second + i, count);
            store_some(out + i, a * load_some(c + i, count) - z * load_some(s + i, count), count);
            store_some(out + half + i, z * load_some(c + half + i, count) + a * load_some(s + half + i, count), count);
        }
        memcpy(out + size, first + size, (w->width - size) * sizeof *out);
    }
}

/* y = x * cos + (-second half of x, first half of x) * sin, of two tensors; cos and sin [batch or 1, tokens, size] with
   the stride `step` of batches. What is wider than these stays as it is. */
void rotate(
    const states *q, const states *k, const number *cosines, const number *sines, int64_t batch, int64_t tokens,
    int64_t size, int64_t step, int64_t threads
) {
    const int64_t numbers = batch * (q->heads + k->heads) * tokens * size;
#pragma omp parallel for collapse(2) schedule(static) num_threads(threads) if (numbers >= ENOUGH)
    for (int64_t b = 0; b < batch; b++)
        for (int64_t t = 0; t < tokens; t++) {
            const int64_t place = b * step + t * size;
            rotate_token(q, b, t, size, cosines + place, sines + place);
            rotate_token(k, b, t, size, cosines + place, sines + place);
        }
}
