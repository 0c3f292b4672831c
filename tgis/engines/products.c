/* Products of rows with a weight that was packed for it, on CPUs with AVX-512: the linear layers of a model.

   packing.py has this compiled when a model is loaded: HALF says whether the numbers are bfloat16 or float32. Sums are
   in float32, in the order of the inputs: what a row gives does not depend on the rows beside it. */

#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define LANES 16
#define TILE 32     /* outputs that are computed together */
#define GROUP 8     /* rows that are computed together */
#define CHUNK 64    /* rows that share what is in the cache of a weight */
#define DEPTH 2048  /* inputs that are read before the next group of rows reads the same */
#define AHEAD 4096  /* bytes of the weight that are fetched before they are needed */

#if HALF
#define PAIR 2 /* inputs that lie side by side in the packed weight */
typedef uint16_t number;
#if defined(__AVX512BF16__) && !defined(__AMX_BF16__) /* oneDNN makes use of AMX */
#define SUITED 1
#endif
#else
#define PAIR 1
typedef float number;
#if defined(__AVX512F__)
#define SUITED 1
#endif
#endif

/* Whether this is of use on this processor. */
int suited(void) {
#if SUITED
    return 1;
#else
    return 0;
#endif
}

#if SUITED

/* sums += inputs (PAIR of them, for all lanes the same) times weights */
static inline __m512 add(__m512 sums, const number *inputs, const number *weights) {
#if HALF
    int32_t pair;
    memcpy(&pair, inputs, sizeof pair);
    return _mm512_dpbf16_ps(sums, (__m512bh)_mm512_set1_epi32(pair), (__m512bh)_mm512_loadu_si512(weights));
#else
    return _mm512_fmadd_ps(_mm512_set1_ps(*inputs), _mm512_loadu_ps(weights), sums);
#endif
}

static inline void store(number *to, const float *from, int64_t count) {
    for (int64_t i = 0; i < count; i += LANES) {
        const __mmask16 mask = count - i < LANES ? (1u << (count - i)) - 1 : 0xffff;
        const __m512 sums = _mm512_maskz_loadu_ps(mask, from + i);
#if HALF
        _mm256_mask_storeu_epi16(to + i, mask, (__m256i)_mm512_cvtneps_pbh(sums));
#else
        _mm512_mask_storeu_ps(to + i, mask, sums);
#endif
    }
}

/* The bias of a tile, of which `count` outputs exist, as the first sum of a row. */
static inline void begin(float *sums, const number *bias, int64_t count) {
    memset(sums, 0, TILE * sizeof *sums);
    for (int64_t i = 0; bias && i < count; i++) {
#if HALF
        const uint32_t bits = (uint32_t)bias[i] << 16;
        memcpy(sums + i, &bits, sizeof bits);
#else
        sums[i] = bias[i];
#endif
    }
}

/* Adds to the sums [rows, TILE] the products of `depth` inputs of each of the rows; `weights` [depth / PAIR, TILE, PAIR] */
static inline __attribute__((always_inline)) void multiply(
    const int rows, const number *x, int64_t inputs, const number *weights, int64_t depth, float *sums
) {
    __m512 s[GROUP][TILE / LANES];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < TILE / LANES; i++) s[r][i] = _mm512_loadu_ps(sums + r * TILE + i * LANES);
    for (int64_t k = 0; k < depth; k += PAIR) {
        const number *w = weights + k * TILE;
        for (int i = 0; i < TILE / LANES; i++) _mm_prefetch((const char *)(w + i * LANES * PAIR) + AHEAD, _MM_HINT_T0);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
            for (int i = 0; i < TILE / LANES; i++) s[r][i] = add(s[r][i], x + r * inputs + k, w + i * LANES * PAIR);
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < TILE / LANES; i++) _mm512_storeu_ps(sums + r * TILE + i * LANES, s[r][i]);
}

static void multiply_all(
    int64_t rows, const number *x, int64_t inputs, const number *weights, int64_t depth, float *sums
) {
    int64_t r = 0;
    for (; r + 8 <= rows; r += 8) multiply(8, x + r * inputs, inputs, weights, depth, sums + r * TILE);
    if (rows - r >= 4) multiply(4, x + r * inputs, inputs, weights, depth, sums + r * TILE), r += 4;
    if (rows - r >= 2) multiply(2, x + r * inputs, inputs, weights, depth, sums + r * TILE), r += 2;
    if (rows - r >= 1) multiply(1, x + r * inputs, inputs, weights, depth, sums + r * TILE);
}

/* y [rows, outputs] = x [rows, inputs] times the packed weight [tiles, inputs / PAIR, TILE, PAIR], plus the bias
   [outputs], if there is one. */
void products(
    const number *x, const number *weight, const number *bias, number *y, int64_t rows, int64_t inputs, int64_t outputs,
    int64_t threads
) {
    const int64_t tiles = (outputs + TILE - 1) / TILE, chunks = (rows + CHUNK - 1) / CHUNK;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t unit = 0; unit < tiles * chunks; unit++) {
        const int64_t tile = unit / chunks, first = unit % chunks * CHUNK;
        const int64_t count = rows - first < CHUNK ? rows - first : CHUNK;
        const int64_t width = outputs - tile * TILE < TILE ? outputs - tile * TILE : TILE;
        float sums[CHUNK * TILE];
        begin(sums, bias ? bias + tile * TILE : NULL, width);
        for (int64_t r = 1; r < count; r++) memcpy(sums + r * TILE, sums, TILE * sizeof *sums);
        for (int64_t k = 0; k < inputs; k += DEPTH) {
            const int64_t depth = inputs - k < DEPTH ? inputs - k : DEPTH;
            const number *weights = weight + (tile * inputs + k) * TILE;
            multiply_all(count, x + first * inputs + k, inputs, weights, depth, sums);
        }
        for (int64_t r = 0; r < count; r++) store(y + (first + r) * outputs + tile * TILE, sums + r * TILE, width);
    }
}

#endif
