/* Norms, rotary embedding, activations, arithmetic and copies, each in one pass; computed in float32 and rounded once. */

#include <math.h>

#include "activations.h"

#define PARALLEL_ELEMENTS 8192 /* fewer are not worth waking the other threads */

typedef struct {
    const scalar_t *weight, *bias; /* [size], or NULL for 1 and 0 */
    int64_t size, is_centered;     /* whether the mean is subtracted */
    float weight_offset, eps;
} norm_params;

static void normalize_row(const norm_params *norm, const scalar_t *x, scalar_t *y) {
    const int64_t size = norm->size;
    const u32_vec lanes = LANE_INDEX;
    f32_vec sums[SUM_VECS] = {{0}}, squares[SUM_VECS] = {{0}};
    for (int64_t first = 0; norm->is_centered && first < size; first += SUM_LANES)
        for (int64_t vec = 0, i = first; vec < SUM_VECS && i < size; vec++, i += LANES)
            sums[vec] += load_partial(x + i, size - i);
    const float mean = reduce_sums(sums) / size;
    for (int64_t first = 0; first < size; first += SUM_LANES)
        for (int64_t vec = 0, i = first; vec < SUM_VECS && i < size; vec++, i += LANES) {
            f32_vec part = load_partial(x + i, size - i) - mean;
            if (size - i < LANES) part = (f32_vec)((u32_vec)part & (u32_vec)(lanes < (uint32_t)(size - i)));
            squares[vec] += part * part;
        }
    const float scale = 1 / sqrtf(reduce_sums(squares) / size + norm->eps);
    for (int64_t i = 0; i < size; i += LANES) {
        f32_vec part = (load_partial(x + i, size - i) - mean) * scale;
        if (norm->weight) part *= load_partial(norm->weight + i, size - i) + norm->weight_offset;
        if (norm->bias) part += load_partial(norm->bias + i, size - i);
        store_partial(y + i, part, size - i);
    }
}

/* y [outer, inner, size] = (x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps) * (weight + weight_offset) + bias, where x
   has any strides but for the last dimension. */
void EXPORT(norm)(
    const norm_params *norm, const scalar_t *x, scalar_t *y, int64_t outer, int64_t inner, int64_t outer_stride,
    int64_t inner_stride, int64_t threads
) {
    const int64_t size = norm->size, rows = outer * inner;
#pragma omp parallel for schedule(static) num_threads(threads) if (rows > 1 && rows * size >= PARALLEL_ELEMENTS)
    for (int64_t row = 0; row < rows; row++)
        normalize_row(norm, x + row / inner * outer_stride + row % inner * inner_stride, y + row * size);
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
            /* A sum, not a difference, of which CPUs fuse different products. */
            const f32_vec y1 = x1 * load_partial(cos + i, count) + x2 * -load_partial(sin + i, count);
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

/* y [rows, size] = activation(gate) * up, whose rows are `stride` apart; up may be NULL for 1 */
void EXPORT(activation)(
    const scalar_t *gate, const scalar_t *up, scalar_t *y, int64_t rows, int64_t size, int64_t gate_stride,
    int64_t up_stride, int64_t kind, int64_t threads
) {
#pragma omp parallel for schedule(static) num_threads(threads) if (rows > 1 && rows * size >= PARALLEL_ELEMENTS)
    for (int64_t row = 0; row < rows; row++)
        for (int64_t i = 0; i < size; i += LANES) {
            f32_vec x = activate(load_partial(gate + row * gate_stride + i, size - i), kind);
            if (up) x *= load_partial(up + row * up_stride + i, size - i);
            store_partial(y + row * size + i, x, size - i);
        }
}

/* Two tensors of four dimensions of the same sizes, some of which may be 1, and an output. */
typedef struct {
    int64_t sizes[4], a_strides[4], b_strides[4];
    float scalar; /* in place of b, if that is NULL */
} strided_params;

static inline int64_t offset_of(int64_t row, const int64_t sizes[4], const int64_t strides[4]) {
    return row / sizes[2] / sizes[1] * strides[0] + row / sizes[2] % sizes[1] * strides[1] + row % sizes[2] * strides[2];
}

#define CHUNK 1024 /* elements for one thread */

#define ARITHMETIC(name, operator)                                                                                   \
    /* y = a operator b; y is contiguous */                                                                          \
    void EXPORT(name)(                                                                                               \
        const strided_params *p, const scalar_t *a, const scalar_t *b, scalar_t *y, int64_t threads                  \
    ) {                                                                                                              \
        const int64_t size = p->sizes[3], rows = p->sizes[0] * p->sizes[1] * p->sizes[2];                            \
        const int64_t a_stride = p->a_strides[3], b_stride = p->b_strides[3];                                        \
        _Pragma("omp parallel for collapse(2) num_threads(threads) if (rows * size >= PARALLEL_ELEMENTS)")           \
        for (int64_t row = 0; row < rows; row++)                                                                     \
            for (int64_t start = 0; start < size; start += CHUNK) {                                                  \
                const scalar_t *a_row = a + offset_of(row, p->sizes, p->a_strides);                                  \
                const scalar_t *b_row = b ? b + offset_of(row, p->sizes, p->b_strides) : NULL;                       \
                for (int64_t i = start; i < min_i64(start + CHUNK, size); i += LANES) {                              \
                    f32_vec other = (f32_vec){0} + p->scalar;                                                        \
                    if (b) other = load_strided(b_row + i * b_stride, b_stride, size - i);                           \
                    const f32_vec x = load_strided(a_row + i * a_stride, a_stride, size - i);                        \
                    store_partial(y + row * size + i, x operator other, size - i);                                   \
                }                                                                                                    \
            }                                                                                                        \
    }

ARITHMETIC(add, +)
ARITHMETIC(subtract, -)
ARITHMETIC(multiply, *)
ARITHMETIC(divide, /)

/* y = a + b for integers */
void EXPORT(add_integer)(const int64_t *a, int64_t b, int64_t *y, int64_t count) {
    for (int64_t i = 0; i < count; i++) y[i] = a[i] + b;
}

/* Copies a to b, whose sizes and strides are in bytes but for the sizes of the first three dimensions; the bytes of the last
   one are side by side. */
void EXPORT(copy)(const strided_params *p, const char *a, char *b) {
    for (int64_t row = 0; row < p->sizes[0] * p->sizes[1] * p->sizes[2]; row++)
        memcpy(b + offset_of(row, p->sizes, p->b_strides), a + offset_of(row, p->sizes, p->a_strides), p->sizes[3]);
}
