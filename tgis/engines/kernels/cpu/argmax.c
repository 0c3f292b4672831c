/* The best token of each row of scores, as rows of the tables of engines/sampling/logprobs.py: between two steps, whose
   weights have gone through all caches, a few operators of PyTorch would take 0.2 ms. */

#include <math.h>

#include "simd.h"

typedef struct {
    double token, state, logprob, rank, num_candidates;
} table_row;

enum { EXACT = 0, INVALID = 2 }; /* RowState */

/* The scores from `start` on; beyond the last one, copies of it. */
static inline f32_vec load_scores(const scalar_t *scores, int64_t start, int64_t size) {
    if (start + LANES <= size) return load(scores + start);
    scalar_t padded[LANES];
    for (int64_t lane = 0; lane < LANES; lane++) padded[lane] = scores[min_i64(start + lane, size - 1)];
    return load(padded);
}

static inline float highest_score(const scalar_t *scores, int64_t size) {
    f32_vec high = (f32_vec){0} - INFINITY;
    u32_vec is_nan = {0};
    for (int64_t start = 0; start < size; start += LANES) {
        const f32_vec part = load_scores(scores, start, size);
        is_nan |= (u32_vec)(part != part);
        high = max_vec(high, part);
    }
    return any_lane(is_nan) ? NAN : reduce_max(high);
}

/* The first token with this score; 0 if there is none. */
static inline int64_t first_with(const scalar_t *scores, int64_t size, float score) {
    for (int64_t start = 0; start < size; start += LANES) {
        const u32_vec found = (u32_vec)(load_scores(scores, start, size) == score);
        if (!any_lane(found)) continue;
        for (int lane = 0; lane < LANES; lane++)
            if (found[lane]) return start + lane;
    }
    return 0;
}

/* table [rows] of scores [rows, size], rows `stride` apart: of the best tokens the lowest, and zeros in columns nobody
   asked for. A row is invalid if its highest score is not finite, or one is NaN. */
void EXPORT(argmax)(
    const scalar_t *scores, int64_t stride, table_row *table, int64_t rows, int64_t size, int64_t threads
) {
#pragma omp parallel for schedule(static) num_threads(threads) if (rows > 1)
    for (int64_t row = 0; row < rows; row++) {
        const float highest = highest_score(scores + row * stride, size);
        const int64_t token = first_with(scores + row * stride, size, highest);
        table[row] = (table_row){token, isfinite(highest) ? EXACT : INVALID, 0, 0, 0};
    }
}
