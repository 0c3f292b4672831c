/* Draws from softmax(scores / temperature) by the Gumbel-max trick: see engines/sampling/draws.py.

   The token with the least E / p is drawn, where p is its probability relative to that of the best token and
   E = -log(1 - u) its noise; -log(E) is Gumbel noise. Hardly any token needs to be looked at: since E >= u, a token with
   a lower E / p than the least so far has u <= p * that least. Vectors compare a u that is rounded down with a p that
   is rounded up. What passes is computed in double precision, so that every instruction set and any order of the
   additions choose the same token. */

#include <math.h>

#include "simd.h"

#define GOLDEN 0x9E3779B97F4A7C15u
#define LARGEST 36.8f /* E / p of the best token, whose p is 1, is below: no E is above 53 * log(2) */
#define SLACK 1.001   /* more than rounding takes from p in single precision */

typedef uint64_t u64_vec __attribute__((vector_size(4 * LANES))); /* half as many lanes */

static inline u64_vec mix(u64_vec z) {
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

/* At least 2^x and at most 1.07 times that, for x up to 0: between powers of two the line is above the curve. */
static inline f32_vec exp2_upper(f32_vec x) {
    const f32_vec lowest = (f32_vec){0} - 126;
    return (f32_vec)__builtin_convertvector((max_vec(x, lowest) + 127) * 0x1p23f, i32_vec);
}

/* -log(E / p) of a token whose score is `below` the best. */
static double noisy_logit(double below, double temperature, uint64_t bits) {
    const double u = ((double)(bits >> 12) + 0.5) * 0x1p-52;
    return below / temperature - log(-log1p(-u));
}

static int64_t gumbel_max_row(const scalar_t *scores, int64_t size, float max, double temperature, uint64_t key) {
    const float scale = M_LOG2E / temperature;
    float least = LARGEST;
    double best = -INFINITY;
    int64_t token_id = 0;
    u64_vec even, odd; /* the hash inputs of tokens 0, 2, ... and 1, 3, ... of a vector */
    for (int lane = 0; lane < LANES / 2; lane++) {
        even[lane] = key + (2 * lane + 1) * GOLDEN;
        odd[lane] = key + (2 * lane + 2) * GOLDEN;
    }
    for (int64_t start = 0; start < size; start += LANES, even += LANES * GOLDEN, odd += LANES * GOLDEN) {
        const f32_vec score = load_partial(scores + start, size - start);
        const u64_vec high = (mix(even) >> 40) | (mix(odd) >> 8 & 0xffffff00000000u); /* 24 bits of each */
        const f32_vec u = __builtin_convertvector((i32_vec)high, f32_vec) * 0x1p-24f;
        const i32_vec may_be_least = u <= least * exp2_upper((score - max) * scale);
        if (!any_lane((u32_vec)may_be_least)) continue;
        for (int lane = 0; lane < min_i64(LANES, size - start); lane++) {
            if (!may_be_least[lane]) continue;
            const uint64_t bits = mix((u64_vec){key + (start + lane + 1) * GOLDEN})[0];
            const double own = noisy_logit((double)score[lane] - max, temperature, bits);
            if (own > best) {
                best = own;
                token_id = start + lane;
                least = fminf(least, exp(-best) * SLACK);
            }
        }
    }
    return token_id;
}

/* token_ids [rows] of scores [rows, size], rows `stride` apart, from what each row has: its highest score, its temperature,
   and the key of its noise. */
void EXPORT(gumbel_max)(
    const scalar_t *scores, int64_t stride, const float *max_scores, const double *temperatures, const uint64_t *keys,
    int64_t *token_ids, int64_t rows, int64_t size, int64_t threads
) {
#pragma omp parallel for schedule(static) num_threads(threads) if (rows > 1)
    for (int64_t row = 0; row < rows; row++)
        token_ids[row] = gumbel_max_row(scores + row * stride, size, max_scores[row], temperatures[row], keys[row]);
}
