/* Tiles of attention: keys and values of KEYS tokens of a KV head, packed so that products with them are quick. */

#include <math.h>

#include "lanes.h"

#define KEYS 128 /* even, and a multiple of LANES */

/* Products of ROWS queries and COLUMNS vectors are summed at once: what there are registers for. */
#define ROWS 6
#if defined(__AVX512F__)
#define COLUMNS 4
#else
#define COLUMNS 1
#endif

/* What is multiplied at once by a lane: two bfloat16 numbers where the processor can, or one float. */
#if HALF && defined(__AVX512BF16__)
#define PAIR 2
#else
#define PAIR 1
#endif
typedef uint32_t cell; /* PAIR numbers, or one float */

#define K_CELLS (K_SIZE / PAIR)
#define V_WIDTH (V_SIZE / LANES)

/* Keys and values of a head, packed for products. */
typedef struct {
    words keys[KEYS / LANES][K_CELLS], values[KEYS / PAIR][V_WIDTH];
} tile;

/* The larger of each; b's where one is no number. */
static inline wide larger(wide a, wide b) {
#if defined(__AVX512F__)
    return (wide)_mm512_max_ps((__m512)a, (__m512)b);
#else
    words is_a = (words)(a > b);
    return (wide)((is_a & (words)a) | (~is_a & (words)b));
#endif
}

static inline float maximum(wide x) {
    x = larger(x, __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
    x = larger(x, __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));
    x = larger(x, __builtin_shufflevector(x, x, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));
    return fmaxf(x[0], x[1]);
}

/* 2 to numbers that are not positive; within 3e-7 of it, 0 for very small ones. */
static inline wide power(wide x) {
    x = larger((wide){0} - 127.0f, x);
    wide nearest = x + 12582912.0f; /* where the last place of a float is 1 */
    wide f = x - (nearest - 12582912.0f);
    wide fraction = 1.0f + f * (0.69314718f + f * (0.24022651f + f * (0.05550411f + f * (0.00961813f +
                    f * (0.00133336f + f * 0.00015404f)))));
    return fraction * (wide)(((words)nearest << 23) + 0x3f800000);
}

static inline wide tanh_of(wide x) {
    words sign = (words)x & 0x80000000;
    wide size = (wide)((words)x ^ sign), e = power(size * -2.88539008f);
    return (wide)((words)((1.0f - e) / (1.0f + e)) | sign);
}

/* Rows to columns. */
static inline void transpose(words x[LANES]) {
#define SWAP(step, low, high)                                                \
    _Pragma("GCC unroll 16") for (int i = 0; i < LANES; i++) if (!(i & step)) { \
        words a = x[i], b = x[i + step];                                     \
        x[i] = __builtin_shufflevector(a, b, low);                           \
        x[i + step] = __builtin_shufflevector(a, b, high);                   \
    }
#define LIST(...) __VA_ARGS__
    SWAP(8, LIST(0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23),
         LIST(8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31))
    SWAP(4, LIST(0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27),
         LIST(4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31))
    SWAP(2, LIST(0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29),
         LIST(2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31))
    SWAP(1, LIST(0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30),
         LIST(1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31))
}

/* The cells of LANES * PAIR numbers, or of as many as are left. */
static inline words cells(const number *from, int left) {
#if PAIR == 2
    words bits = {0};
    memcpy(&bits, from, left < LANES * PAIR ? LANES * sizeof(number) : sizeof bits);
    return bits;
#else
    (void)left;
    return (words)load(from);
#endif
}

/* Keys of LANES tokens, `apart` from each other, by column: vectors of one cell of each. Others at `ahead` are fetched. */
static inline void pack_keys(const number *keys, int apart, const number *ahead, words packed[K_CELLS]) {
    for (int c = 0; c < K_CELLS; c += LANES) {
        words x[LANES];
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) {
            __builtin_prefetch(ahead + i * KV_HEADS * K_SIZE + c * PAIR);
            x[i] = cells(keys + i * apart + c * PAIR, K_SIZE - c * PAIR);
        }
        transpose(x);
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++)
            if (c + i < K_CELLS) packed[c + i] = x[i];
    }
}

/* Values of LANES tokens: vectors of LANES of their numbers, of PAIR tokens. */
static inline void pack_values(const number *values, int apart, const number *ahead,
                               words packed[LANES / PAIR][V_WIDTH]) {
    for (int t = 0; t < LANES; t += PAIR)
        for (int i = 0; i < V_WIDTH; i++) {
            if (i % PAIR == 0) {
                __builtin_prefetch(ahead + t * KV_HEADS * V_SIZE + i * LANES);
                if (PAIR == 2) __builtin_prefetch(ahead + (t + 1) * KV_HEADS * V_SIZE + i * LANES);
            }
#if PAIR == 2
            halves even, odd;
            memcpy(&even, values + t * apart + i * LANES, sizeof even);
            memcpy(&odd, values + (t + 1) * apart + i * LANES, sizeof odd);
            packed[t / 2][i] = __builtin_convertvector(even, words) | __builtin_convertvector(odd, words) << 16;
#else
            packed[t][i] = (words)load(values + t * apart + i * LANES);
#endif
        }
}

static inline wide multiplied(wide sum, words a, words b) {
#if PAIR == 2
    return (wide)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#else
    return sum + (wide)a * (wide)b;
#endif
}

/* sums[ROWS][COLUMNS] = sums * shrink + a[rows][depth] b[depth][columns]: cells of `a` are taken one by one, and those
   of `b` in vectors. Strides are in cells and vectors. */
static inline __attribute__((always_inline)) void product(
    const int rows, const int columns, int depth, const cell *a, int a_row, const words *b, int b_depth, int b_column,
    wide *sums, int sums_row, const float *shrink) {
    wide s[ROWS][COLUMNS];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int c = 0; c < columns; c++) s[r][c] = shrink ? sums[r * sums_row + c] * shrink[r] : (wide){0};
    for (int d = 0; d < depth; d++) {
        words line[COLUMNS];
#pragma GCC unroll 8
        for (int c = 0; c < columns; c++) line[c] = b[d * b_depth + c * b_column];
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            words x = (words){0} + a[r * a_row + d];
#pragma GCC unroll 8
            for (int c = 0; c < columns; c++) s[r][c] = multiplied(s[r][c], x, line[c]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int c = 0; c < columns; c++) sums[r * sums_row + c] = s[r][c];
}

static inline __attribute__((always_inline)) void products(
    const int rows, int columns, int depth, const cell *a, int a_row, const words *b, int b_depth, int b_column,
    wide *sums, int sums_row, const float *shrink) {
    for (; columns >= COLUMNS; columns -= COLUMNS, b += COLUMNS * b_column, sums += COLUMNS)
        product(rows, COLUMNS, depth, a, a_row, b, b_depth, b_column, sums, sums_row, shrink);
    for (; columns; columns--, b += b_column, sums++)
        product(rows, 1, depth, a, a_row, b, b_depth, b_column, sums, sums_row, shrink);
}
