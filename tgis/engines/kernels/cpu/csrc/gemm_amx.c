/* gemm.c for bfloat16 by AMX, over the same packed weights, where k is a multiple of TILE_K.

   Sums are taken in another order than there: those of TILE_K products each, added to the bias in the order of k. What a
   row of x gives does not depend on the rows beside it here either. */

#include "amx.h"
#include "gemm.h"

#if BF16 && HAS_AMX

#include <sys/syscall.h>
#include <unistd.h>

#define TILE_K 32            /* elements along k in a tile register */
#define TILE_M 16            /* rows of x, or outputs, in one */
#define CHUNK_M (2 * TILE_M) /* rows that a thread takes at a time */
#define STEP_BYTES (TILE_K * TILE_N * sizeof(scalar_t))
#define PREFETCH_BYTES (2 * STEP_BYTES)
#define ARCH_REQ_XCOMP_PERM 0x1023
#define XFEATURE_XTILEDATA 18

/* Tiles 0 to 3 are for sums, [row tile][half of the outputs]; 4 and 5 for rows of x; 6 and 7 for weights. */
static void configure_for_rows(int64_t rows) {
    const uint8_t first = min_i64(rows, TILE_M), second = max_i64(rows - TILE_M, 1);
    const uint8_t tile_rows[8] = {first, first, second, second, first, second, TILE_M, TILE_M};
    const uint8_t row_bytes[8] = {64, 64, 64, 64, 64, 64, 64, 64};
    configure_tiles(tile_rows, row_bytes);
}

/* sums [rows, TILE_N] += x [rows, k] * one tile of the packed weight, for rows in one or two row tiles. */
INLINE void multiply_rows(
    const int row_tiles, const scalar_t *x, const scalar_t *weights, int64_t k, float *sums
) {
    float *second = sums + TILE_M * TILE_N;
    TILE_LOAD(0, sums, TILE_N);
    TILE_LOAD(1, sums + TILE_M, TILE_N);
    if (row_tiles == 2) {
        TILE_LOAD(2, second, TILE_N);
        TILE_LOAD(3, second + TILE_M, TILE_N);
    }
    for (int64_t i = 0; i < k; i += TILE_K, x += TILE_K, weights += TILE_K * TILE_N) {
        for (size_t ahead = 0; ahead < STEP_BYTES; ahead += CACHE_LINE)
            __builtin_prefetch((const char *)weights + PREFETCH_BYTES + ahead);
        TILE_LOAD(6, weights, TILE_N * PAIR);
        TILE_LOAD(7, weights + TILE_M * PAIR, TILE_N * PAIR);
        TILE_LOAD(4, x, k);
        TILE_MULTIPLY_ADD("tdpbf16ps", 0, 4, 6);
        TILE_MULTIPLY_ADD("tdpbf16ps", 1, 4, 7);
        if (row_tiles == 2) {
            TILE_LOAD(5, x + TILE_M * k, k);
            TILE_MULTIPLY_ADD("tdpbf16ps", 2, 5, 6);
            TILE_MULTIPLY_ADD("tdpbf16ps", 3, 5, 7);
        }
    }
    TILE_STORE(0, sums, TILE_N);
    TILE_STORE(1, sums + TILE_M, TILE_N);
    if (row_tiles == 2) {
        TILE_STORE(2, second, TILE_N);
        TILE_STORE(3, second + TILE_M, TILE_N);
    }
}

/* The outputs of one tile of the packed weight for `rows` rows from `first` on. */
static void multiply_chunk(const gemm_args *args, int64_t first, int64_t rows, int64_t tile) {
    const scalar_t *x = args->x + first * args->k, *weights = args->weight + tile * args->k * TILE_N;
    float sums[CHUNK_M][TILE_N] ALIGNED;
    load_bias(args, tile, sums[0]);
    for (int64_t row = 1; row < rows; row++) memcpy(sums[row], sums[0], sizeof sums[0]);
    if (rows > TILE_M) multiply_rows(2, x, weights, args->k, sums[0]);
    else multiply_rows(1, x, weights, args->k, sums[0]);
    for (int64_t row = 0; row < rows; row++) store_sums(args, first + row, tile, sums[row]);
}

/* Whether the system lets this process use AMX, which it has to ask for. */
int EXPORT(request_amx)(void) { return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0; }

void EXPORT(gemm_amx)(
    const scalar_t *x, const scalar_t *weight, const scalar_t *bias, scalar_t *y, int64_t m, int64_t k, int64_t n,
    int64_t threads
) {
    const gemm_args args = {x, bias, weight, y, m, k, n};
    const int64_t tiles = (n + TILE_N - 1) / TILE_N, chunks = (m + CHUNK_M - 1) / CHUNK_M;
#pragma omp parallel num_threads(threads)
    {
        int64_t configured = 0;
#pragma omp for schedule(static)
        for (int64_t unit = 0; unit < tiles * chunks; unit++) {
            const int64_t first = unit % chunks * CHUNK_M, rows = min_i64(m - first, CHUNK_M);
            if (rows != configured) configure_for_rows(configured = rows);
            multiply_chunk(&args, first, rows, unit / chunks);
        }
        release_tiles();
    }
}

#endif
