/* Pieces of attention over one tile of the KV cache: softmax arithmetic, packing of keys and values, a small GEMM.

   Packed data is made of 32-bit cells: two bfloat16 numbers where the CPU multiplies these in pairs, else one float. */

#include "simd.h"

#define TILE 128 /* tokens of a KV tile; a multiple of LANES */

/* How many queries and vectors of columns the GEMM holds in registers. */
#define GEMM_ROWS 6
#if defined(__AVX512F__)
#define GEMM_COLUMNS 4
#else
#define GEMM_COLUMNS 2
#endif

#if BF16 && defined(__AVX512BF16__)
#define PAIR 2 /* numbers in a cell */
#else
#define PAIR 1
#endif
typedef uint32_t cell;

#define INLINE static inline __attribute__((always_inline))

/* Transposes LANES x LANES cells in place. */
static inline void transpose(u32_vec x[LANES]) {
#define EXCHANGE(step, low, high)                                               \
    _Pragma("GCC unroll 16") for (int i = 0; i < LANES; i++) if (!(i & step)) { \
        u32_vec a = x[i], b = x[i + step];                                       \
        x[i] = SHUFFLE(a, b, low);                                              \
        x[i + step] = SHUFFLE(a, b, high);                                      \
    }
#define LIST(...) __VA_ARGS__
#if LANES == 16
    EXCHANGE(8, LIST(0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23),
             LIST(8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31))
    EXCHANGE(4, LIST(0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27),
             LIST(4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31))
    EXCHANGE(2, LIST(0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29),
             LIST(2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31))
    EXCHANGE(1, LIST(0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30),
             LIST(1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31))
#elif LANES == 8
    EXCHANGE(4, LIST(0, 1, 2, 3, 8, 9, 10, 11), LIST(4, 5, 6, 7, 12, 13, 14, 15))
    EXCHANGE(2, LIST(0, 1, 8, 9, 4, 5, 12, 13), LIST(2, 3, 10, 11, 6, 7, 14, 15))
    EXCHANGE(1, LIST(0, 8, 2, 10, 4, 12, 6, 14), LIST(1, 9, 3, 11, 5, 13, 7, 15))
#else
    EXCHANGE(2, LIST(0, 1, 4, 5), LIST(2, 3, 6, 7))
    EXCHANGE(1, LIST(0, 4, 2, 6), LIST(1, 5, 3, 7))
#endif
#undef EXCHANGE
#undef LIST
}

/* `count` cells, LANES or half of that; the other lanes are 0. */
INLINE u32_vec load_cells(const scalar_t *from, const int count) {
#if PAIR == 2
    u32_vec bits = {0};
    memcpy(&bits, from, count * sizeof(cell));
    return bits;
#else
    (void)count;
    return (u32_vec)load(from);
#endif
}

INLINE void pack_key_cells(
    const scalar_t *keys, int64_t stride, const scalar_t *next, int64_t next_stride, u32_vec *packed, const int count
) {
    u32_vec x[LANES];
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++, keys += stride, next += next_stride) {
        __builtin_prefetch(next);
        x[i] = load_cells(keys, count);
    }
    transpose(x);
#pragma GCC unroll 16
    for (int i = 0; i < count; i++) packed[i] = x[i];
}

/* Keys of LANES tokens [LANES, k_size] to vectors with one cell of each token, [k_size / PAIR]; prefetches `next`. */
static inline void pack_keys(
    const scalar_t *keys, int64_t stride, int k_size, const scalar_t *next, int64_t next_stride, u32_vec *packed
) {
    int c = 0;
    for (; (c + LANES) * PAIR <= k_size; c += LANES)
        pack_key_cells(keys + c * PAIR, stride, next + c * PAIR, next_stride, packed + c, LANES);
    if (c * PAIR < k_size) /* pairs, and k_size is an odd multiple of LANES */
        pack_key_cells(keys + c * PAIR, stride, next + c * PAIR, next_stride, packed + c, LANES / 2);
}

/* Values of LANES tokens [LANES, v_size] to vectors with one cell of PAIR tokens for each of LANES columns,
   [LANES / PAIR, v_size / LANES]; prefetches `next`. */
static inline void pack_values(
    const scalar_t *values, int64_t stride, int v_size, const scalar_t *next, int64_t next_stride, u32_vec *packed
) {
    for (int t = 0; t < LANES; t += PAIR, values += PAIR * stride, next += PAIR * next_stride)
#pragma GCC unroll 4
        for (int i = 0; i < v_size; i += LANES) {
            if (i % (PAIR * LANES) == 0) {
                __builtin_prefetch(next + i);
                if (PAIR == 2) __builtin_prefetch(next + next_stride + i);
            }
#if PAIR == 2
            u16_vec even, odd;
            memcpy(&even, values + i, sizeof even);
            memcpy(&odd, values + stride + i, sizeof odd);
            *packed++ = __builtin_convertvector(even, u32_vec) | __builtin_convertvector(odd, u32_vec) << 16;
#else
            *packed++ = (u32_vec)load(values + i);
#endif
        }
}

static inline f32_vec multiply_add(f32_vec sum, u32_vec a, u32_vec b) {
#if PAIR == 2
    return (f32_vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#else
    return sum + (f32_vec)a * (f32_vec)b;
#endif
}

INLINE void gemm_block(
    const int rows, const int columns, int depth, const cell *a, int64_t a_row, const u32_vec *b, int64_t b_depth,
    int64_t b_column, f32_vec *c, int64_t c_row, const float *c_scale
) {
    f32_vec sums[GEMM_ROWS][GEMM_COLUMNS];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int j = 0; j < columns; j++) sums[r][j] = c_scale ? c[r * c_row + j] * c_scale[r] : (f32_vec){0};
    for (int d = 0; d < depth; d++) {
        u32_vec b_row[GEMM_COLUMNS];
#pragma GCC unroll 8
        for (int j = 0; j < columns; j++) b_row[j] = b[d * b_depth + j * b_column];
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            u32_vec x = (u32_vec){0} + a[r * a_row + d];
#pragma GCC unroll 8
            for (int j = 0; j < columns; j++) sums[r][j] = multiply_add(sums[r][j], x, b_row[j]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int j = 0; j < columns; j++) c[r * c_row + j] = sums[r][j];
}

/* c [rows, columns] = c * c_scale (a factor for each row; NULL is 0) + a [rows, depth] b [depth, columns]: `a` in cells,
   `b` and `c` in vectors of cells, all with their strides. */
INLINE void gemm_rows(
    const int rows, int columns, int depth, const cell *a, int64_t a_row, const u32_vec *b, int64_t b_depth,
    int64_t b_column, f32_vec *c, int64_t c_row, const float *c_scale
) {
    for (; columns >= GEMM_COLUMNS; columns -= GEMM_COLUMNS, b += GEMM_COLUMNS * b_column, c += GEMM_COLUMNS)
        gemm_block(rows, GEMM_COLUMNS, depth, a, a_row, b, b_depth, b_column, c, c_row, c_scale);
    for (; columns; columns--, b += b_column, c++)
        gemm_block(rows, 1, depth, a, a_row, b, b_depth, b_column, c, c_row, c_scale);
}
