/* The best token of each row of scores, as rows of the tables of engines/sampling/logprobs.py: between two steps, whose
   weights have gone through all caches, a few operators of PyTorch would take 0.2 ms. */

#include <math.h>

#include "simd.h"

#define MASS_SCORES 4096 /* added up in single precision */

typedef struct {
    double token, state, logprob, rank, num_candidates;
} table_row;

enum { VALID = 0, INVALID = 1 };

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

/* The sum of e^(score - highest): in single precision over some scores, in double precision over all. */
static double softmax_mass(const scalar_t *scores, int64_t size, float highest) {
    double mass = 0;
    for (int64_t start = 0; start < size; start += MASS_SCORES) {
        f32_vec sums[SUM_VECS] = {{0}};
        const int64_t end = min_i64(start + MASS_SCORES, size), whole = start + (end - start) / SUM_LANES * SUM_LANES;
        for (int64_t i = start; i < whole; i += SUM_LANES)
            for (int vec = 0; vec < SUM_VECS; vec++)
                sums[vec] += exp2_f32((load(scores + i + vec * LANES) - highest) * LOG2_E);
        mass += reduce_sums(sums);
        for (int64_t i = whole; i < end; i += LANES) {
            const f32_vec rest = exp2_f32((load_partial(scores + i, end - i) - highest) * LOG2_E);
            for (int64_t lane = 0; lane < min_i64(end - i, LANES); lane++) mass += rest[lane];
        }
    }
    return mass;
}

/* table [rows] of scores [rows, size], rows `stride` apart: of the best tokens the lowest. The columns of details are
   zeros unless somebody asked for them. A row is invalid if its highest score is not finite, or one is NaN. */
void EXPORT(argmax)(
    const scalar_t *scores, int64_t stride, table_row *table, int64_t rows, int64_t size, int64_t details,
    int64_t threads
) {
#pragma omp parallel for schedule(static) num_threads(threads) if (rows > 1)
    for (int64_t row = 0; row < rows; row++) {
        const scalar_t *own = scores + row * stride;
        const float highest = highest_score(own, size);
        table[row] = (table_row){first_with(own, size, highest), isfinite(highest) ? VALID : INVALID, 0, 0, 0};
        if (!details) continue;
        table[row].logprob = -log(softmax_mass(own, size, highest));
        table[row].rank = 1;
    }
}
