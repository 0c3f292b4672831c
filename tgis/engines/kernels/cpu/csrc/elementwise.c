/* RMS norm, rotary embedding, gated activation, sums, products and look-ups, each in one pass; computed in float32 and
   rounded once. */

#include <math.h>

#include "simd.h"

#define PARALLEL_ELEMENTS 8192 /* fewer are not worth waking the other threads */

typedef struct {
    const scalar_t *weight; /* [size] */
    int64_t size;
    float weight_offset, eps;
} rms_norm_params;

/* y [outer, inner, size] = x / sqrt(mean(x^2) + eps) * (weight + weight_offset), where x has any strides but for the last
   dimension. */
void EXPORT(rms_norm)(
    const rms_norm_params *norm, const scalar_t *x, scalar_t *y, int64_t outer, int64_t inner, int64_t outer_stride,
    int64_t inner_stride, int64_t threads
) {
    const int64_t size = norm->size, rows = outer * inner;
#pragma omp parallel for schedule(static) num_threads(threads) if (rows > 1 && rows * size >= PARALLEL_ELEMENTS)
    for (int64_t row = 0; row < rows; row++) {
        const scalar_t *x_row = x + row / inner * outer_stride + row % inner * inner_stride;
        f32_vec squares = {0};
        for (int64_t i = 0; i < size; i += LANES) {
            const f32_vec part = load_partial(x_row + i, size - i);
            squares += part * part;
        }
        const float scale = 1 / sqrtf(reduce_add(squares) / size + norm->eps);
        for (int64_t i = 0; i < size; i += LANES) {
            const f32_vec w = load_partial(norm->weight + i, size - i) + norm->weight_offset;
            store_partial(y + row * size + i, load_partial(x_row + i, size - i) * scale * w, size - i);
        }
    }
}

/* q or k [batch, heads, tokens, head_size] and its output, each with its own strides; the last dimension is contiguous. */
typedef struct {
    const scalar_t *x;
    scalar_t *y;
    int64_t heads, head_size, x_strides[3], y_strides[3]; /* of batch, heads, tokens */
} rotary_tensor;

static void rotate_token(
    const rotary_tensor *tensor, int64_t batch, int64_t token, int64_t rotary_size, const scalar_t *cos,
    const scalar_t *sin
) {
    const int64_t half = rotary_size / 2, *from = tensor->x_strides, *to = tensor->y_strides;
    for (int64_t head = 0; head < tensor->heads; head++) {
        const scalar_t *x = tensor->x + batch * from[0] + head * from[1] + token * from[2];
        scalar_t *y = tensor->y + batch * to[0] + head * to[1] + token * to[2];
        for (int64_t i = 0; i < half; i += LANES) {
            const int64_t count = half - i;
            const f32_vec x1 = load_partial(x + i, count), x2 = load_partial(x + half + i, count);
            const f32_vec y1 = x1 * load_partial(cos + i, count) - x2 * load_partial(sin + i, count);
            const f32_vec y2 = x2 * load_partial(cos + half + i, count) + x1 * load_partial(sin + half + i, count);
            store_partial(y + i, y1, count);
            store_partial(y + half + i, y2, count);
        }
        memcpy(y + rotary_size, x + rotary_size, (tensor->head_size - rotary_size) * sizeof *y);
    }
}

/* y = x * cos + rotate_half(x) * sin for q and k; cos and sin [batch or 1, tokens, rotary_size], where `batch_stride` is
   0 if all rows share them. Elements of a head beyond rotary_size are copied. */
void EXPORT(rotary_embedding)(
    const rotary_tensor *q, const rotary_tensor *k, const scalar_t *cos, const scalar_t *sin, int64_t batches,
    int64_t tokens, int64_t rotary_size, int64_t batch_stride, int64_t threads
) {
    const int64_t elements = batches * (q->heads + k->heads) * tokens * rotary_size;
#pragma omp parallel for collapse(2) schedule(static) num_threads(threads) if (elements >= PARALLEL_ELEMENTS)
    for (int64_t batch = 0; batch < batches; batch++)
        for (int64_t token = 0; token < tokens; token++) {
            const int64_t offset = batch * batch_stride + token * rotary_size;
            rotate_token(q, batch, token, rotary_size, cos + offset, sin + offset);
            rotate_token(k, batch, token, rotary_size, cos + offset, sin + offset);
        }
}

static inline f32_vec silu(f32_vec x) {
    x = max_vec((f32_vec){0} - 87.0f, x); /* e^87 is below 2^126; the result is 0 but for rounding anyway */
    return x / (1.0f + exp2_scalar(x * -1.44269504f));
}

static inline f32_vec gelu_tanh(f32_vec x) {
    return 0.5f * x * (1.0f + tanh_f32(0.79788456f * (x + 0.044715f * x * x * x)));
}

/* y [rows, size] = activation(gate) * up, whose rows are `stride` apart */
void EXPORT(gated_activation)(
    const scalar_t *gate, const scalar_t *up, scalar_t *y, int64_t rows, int64_t size, int64_t gate_stride,
    int64_t up_stride, int64_t is_gelu, int64_t threads
) {
#pragma omp parallel for schedule(static) num_threads(threads) if (rows > 1 && rows * size >= PARALLEL_ELEMENTS)
    for (int64_t row = 0; row < rows; row++)
        for (int64_t i = 0; i < size; i += LANES) {
            const f32_vec x = load_partial(gate + row * gate_stride + i, size - i);
            const f32_vec factor = load_partial(up + row * up_stride + i, size - i);
            store_partial(y + row * size + i, (is_gelu ? gelu_tanh(x) : silu(x)) * factor, size - i);
        }
}

/* y [count, size] = the rows `ids` of a table [rows, size], in bytes. Returns 0, or 1 if there is no such row. */
int EXPORT(embedding)(const char *table, const int64_t *ids, char *y, int64_t count, int64_t rows, int64_t size) {
    for (int64_t i = 0; i < count; i++) {
        if (ids[i] < 0 || ids[i] >= rows) return 1;
        memcpy(y + i * size, table + ids[i] * size, size);
    }
    return 0;
}

#define ELEMENTWISE(name, operator)                                                                                \
    /* y = a operator b, of `count` elements */                                                                      \
    void EXPORT(name)(const scalar_t *a, const scalar_t *b, scalar_t *y, int64_t count, int64_t threads) {           \
        _Pragma("omp parallel for schedule(static) num_threads(threads) if (count >= PARALLEL_ELEMENTS)")            \
        for (int64_t i = 0; i < count; i += LANES)                                                                  \
            store_partial(y + i, load_partial(a + i, count - i) operator load_partial(b + i, count - i), count - i); \
    }

ELEMENTWISE(add, +)
ELEMENTWISE(multiply, *)
