/* Linear layers: y [m, n] = x [m, k] times a weight [n, k] that was packed for this, plus a bias.

   Needs AVX-512, for bfloat16 AVX512-BF16. Sums are in float32 and in the order of k, so that what a row of x gives does
   not depend on the rows beside it. */

#include "simd.h"

#if defined(__AVX512F__) && (!BF16 || defined(__AVX512BF16__))

#define TILE_N 32          /* outputs computed together */
#define TILE_M 8           /* rows computed together */
#define CHUNK_M 64         /* rows that a thread takes at a time */
#define CACHE_LINE 64      /* bytes */
#define PREFETCH_BYTES 4096 /* how far ahead a single tile of rows fetches the weight */
#define PAIR (BF16 ? 2 : 1) /* elements along k side by side in the packed weight */

typedef struct {
    const scalar_t *x, *weight, *bias; /* [m, k]; [n tiles, k / PAIR, TILE_N, PAIR]; [n] or NULL */
    scalar_t *y;                       /* [m, n] */
    int64_t m, k, n;
} gemm_args;

/* sums += x (PAIR elements, the same for all lanes) * weights */
static inline __m512 multiply_add(__m512 sums, const scalar_t *x, const scalar_t *weights) {
#if BF16
    int32_t pair;
    memcpy(&pair, x, sizeof pair);
    return _mm512_dpbf16_ps(sums, (__m512bh)_mm512_set1_epi32(pair), (__m512bh)_mm512_loadu_si512(weights));
#else
    return _mm512_fmadd_ps(_mm512_set1_ps(*x), _mm512_loadu_ps(weights), sums);
#endif
}

/* The lanes of outputs from `first` on that exist. */
static inline __mmask16 lane_mask(int64_t first, int64_t n) {
    return n - first >= LANES ? 0xffff : n > first ? (1u << (n - first)) - 1 : 0;
}

static inline __m512 load_masked(const scalar_t *from, __mmask16 mask) {
#if BF16
    const __m512i bits = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, from));
    return _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
#else
    return _mm512_maskz_loadu_ps(mask, from);
#endif
}

static inline void store_masked(scalar_t *to, __mmask16 mask, __m512 sums) {
#if BF16
    _mm256_mask_storeu_epi16(to, mask, (__m256i)_mm512_cvtneps_pbh(sums));
#else
    _mm512_mask_storeu_ps(to, mask, sums);
#endif
}

/* One output tile of `rows` rows from `row` on, while prefetching `step` bytes of `next` for every k. */
static inline __attribute__((always_inline)) void gemm_tile(
    const gemm_args *args, const int rows, int64_t row, int64_t tile, const char *next, int64_t step
) {
    const scalar_t *x = args->x + row * args->k, *weights = args->weight + tile * args->k * TILE_N;
    const int64_t first = tile * TILE_N;
    __m512 sums[TILE_M][TILE_N / LANES];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < TILE_N / LANES; i++) {
            const int64_t column = first + i * LANES;
            sums[r][i] = args->bias ? load_masked(args->bias + column, lane_mask(column, args->n)) : _mm512_setzero_ps();
        }
    for (int64_t k = 0; k < args->k; k += PAIR, next += step) {
        _mm_prefetch(next, _MM_HINT_T0);
        _mm_prefetch(next + CACHE_LINE, _MM_HINT_T0);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
            for (int i = 0; i < TILE_N / LANES; i++)
                sums[r][i] = multiply_add(sums[r][i], x + r * args->k + k, weights + k * TILE_N + i * LANES * PAIR);
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < TILE_N / LANES; i++) {
            const int64_t column = first + i * LANES;
            store_masked(args->y + (row + r) * args->n + column, lane_mask(column, args->n), sums[r][i]);
        }
}

/* One output tile of the rows [first, last). A single tile of rows is bound by memory and prefetches the weight a little
   ahead; several reuse this weight tile from cache, and each prefetches its share of the next one. */
static void gemm_column(const gemm_args *args, int64_t first, int64_t last, int64_t tile) {
    const int64_t row_tiles = (last - first + TILE_M - 1) / TILE_M, step = TILE_N * PAIR * sizeof(scalar_t) / row_tiles;
    const char *weights = (const char *)(args->weight + tile * args->k * TILE_N);
    const char *next = row_tiles > 1 ? weights + args->k * TILE_N * sizeof(scalar_t) : weights + PREFETCH_BYTES;
    int64_t row = first;
    for (; row + 8 <= last; row += 8, next += args->k / PAIR * step) gemm_tile(args, 8, row, tile, next, step);
    if (last - row >= 4) gemm_tile(args, 4, row, tile, next, step), row += 4;
    if (last - row >= 2) gemm_tile(args, 2, row, tile, next, step), row += 2;
    if (last - row >= 1) gemm_tile(args, 1, row, tile, next, step);
}

void EXPORT(gemm)(
    const scalar_t *x, const scalar_t *weight, const scalar_t *bias, scalar_t *y, int64_t m, int64_t k, int64_t n,
    int64_t threads
) {
    const gemm_args args = {x, weight, bias, y, m, k, n};
    const int64_t tiles = (n + TILE_N - 1) / TILE_N, chunks = (m + CHUNK_M - 1) / CHUNK_M;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t unit = 0; unit < tiles * chunks; unit++) {
        const int64_t first = unit % chunks * CHUNK_M, last = min_i64(first + CHUNK_M, m);
        gemm_column(&args, first, last, unit / chunks);
    }
}

#endif
