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
#ifndef CHUNK
#ifndef CHUNK
#ifndef CHUNK
#ifndef CHUNK
#define CHUNK 64    /* rows that a thread takes at a time */
#endif
#endif
#endif
#endif
#define LINE 64     /* bytes that are fetched together */
#define AHEAD 4096  /* bytes that are fetched ahead by a single group of rows */

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

/* Which of LANES numbers from `first` on are among `count`. */
static inline __mmask16 among(int64_t first, int64_t count) {
    return count - first >= LANES ? 0xffff : count > first ? (1u << (count - first)) - 1 : 0;
}

static inline __m512 load(const number *from, __mmask16 mask) {
#if HALF
    const __m512i bits = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, from));
    return _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
#else
    return _mm512_maskz_loadu_ps(mask, from);
#endif
}

static inline void store(number *to, __mmask16 mask, __m512 sums) {
#if HALF
    _mm256_mask_storeu_epi16(to, mask, (__m256i)_mm512_cvtneps_pbh(sums));
#else
    _mm512_mask_storeu_ps(to, mask, sums);
#endif
}

typedef struct {
    const number *x, *weight, *bias; /* [rows, inputs]; [tiles, inputs / PAIR, TILE, PAIR]; [outputs], or none */
    number *y;                       /* [rows, outputs] */
    int64_t rows, inputs, outputs;
} work;

/* A tile of the outputs of `rows` rows from `row` on. Meanwhile `step` bytes at a time are fetched from `next` on. */
static inline __attribute__((always_inline)) void multiply(
    const work *w, const int rows, int64_t row, int64_t tile, const char *next, int64_t step
) {
    const number *x = w->x + row * w->inputs, *weights = w->weight + tile * w->inputs * TILE;
    const int64_t first = tile * TILE;
    __m512 sums[GROUP][TILE / LANES];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < TILE / LANES; i++)
            sums[r][i] = w->bias ? load(w->bias + first + i * LANES, among(first + i * LANES, w->outputs))
                                 : _mm512_setzero_ps();
    for (int64_t k = 0; k < w->inputs; k += PAIR, next += step) {
        _mm_prefetch(next, _MM_HINT_T0);
        _mm_prefetch(next + LINE, _MM_HINT_T0);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
            for (int i = 0; i < TILE / LANES; i++)
                sums[r][i] = add(sums[r][i], x + r * w->inputs + k, weights + k * TILE + i * LANES * PAIR);
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < TILE / LANES; i++)
            store(w->y + (row + r) * w->outputs + first + i * LANES, among(first + i * LANES, w->outputs), sums[r][i]);
}

/* A tile of the outputs of the rows from `first` to before `last`. A group of them alone waits for memory anyhow; several
   share this part of the weight, and each of them fetches its share of the next meanwhile. */
static void multiply_tile(const work *w, int64_t first, int64_t last, int64_t tile) {
    const int64_t groups = (last - first + GROUP - 1) / GROUP, step = TILE * PAIR * sizeof(number) / groups;
    const char *weights = (const char *)(w->weight + tile * w->inputs * TILE);
    const char *next = groups > 1 ? weights + w->inputs * TILE * sizeof(number) : weights + AHEAD;
    int64_t row = first;
    for (; row + 8 <= last; row += 8, next += w->inputs / PAIR * step) multiply(w, 8, row, tile, next, step);
    if (last - row >= 4) multiply(w, 4, row, tile, next, step), row += 4;
    if (last - row >= 2) multiply(w, 2, row, tile, next, step), row += 2;
    if (last - row >= 1) multiply(w, 1, row, tile, next, step);
}

/* y = x times the packed weight, plus the bias. */
void products(
    const number *x, const number *weight, const number *bias, number *y, int64_t rows, int64_t inputs, int64_t outputs,
    int64_t threads
) {
    const work w = {x, weight, bias, y, rows, inputs, outputs};
    const int64_t tiles = (outputs + TILE - 1) / TILE, chunks = (rows + CHUNK - 1) / CHUNK;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t unit = 0; unit < tiles * chunks; unit++) {
        const int64_t first = unit % chunks * CHUNK, last = first + CHUNK < rows ? first + CHUNK : rows;
        multiply_tile(&w, first, last, unit / chunks);
    }
}

#endif
