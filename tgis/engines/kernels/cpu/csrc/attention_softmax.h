/* The softmax over tiles of the context, computed online.

   The state of a query is v_vecs vectors of values weighted by 2^(score - max), then SUM_VECS of sums of these weights,
   then the max in lane 0. */

#ifndef ATTENTION_SOFTMAX_H
#define ATTENTION_SOFTMAX_H

#include <float.h>
#include <math.h>

#include "attention_args.h"
#include "attention_tile.h"

static inline int64_t v_vecs(const attention_args *args) { return args->v_size / LANES; }
static inline int64_t max_vec_of(const attention_args *args) { return v_vecs(args) + SUM_VECS; }
static inline int64_t state_vecs(const attention_args *args) { return max_vec_of(args) + 1; }

/* What the scores of a query are multiplied by, once they have been prepared, for exponents of 2. */
INLINE float score_scale(const attention_args *args) {
    return args->softcap != 0 || args->scale <= 0 || args->bias ? 1 : args->scale * LOG2_E;
}

/* Prepares the scores of a query for `vecs` vectors of tokens: those of unseen tokens become -infinity. Returns the
   largest exponent so far. */
INLINE float mask_scores(
    const attention_args *args, f32_vec *scores, int vecs, int64_t begin, context seen, const f32_vec *state
) {
    const u32_vec lanes = LANE_INDEX;
    const float cap = args->softcap;
    if (cap != 0 || args->scale <= 0 || args->bias)
        for (int i = 0; i < vecs; i++) {
            f32_vec x = scores[i] * (cap == 0 ? args->scale : args->scale / cap);
            if (cap != 0) x = cap * tanh_f32(x);
            if (seen.bias) x += load_f32(seen.bias + begin + i * LANES); /* one product to add to: all fuse the same one */
            scores[i] = LOG2_E * x;
        }
    if (seen.begin > begin || seen.end < begin + vecs * LANES) {
        const uint32_t first = max_i64(seen.begin - begin, 0), end = max_i64(seen.end - begin, 0);
        for (int i = 0; i < vecs; i++) {
            u32_vec at = lanes + i * LANES, hidden = (u32_vec)(at < first) | (u32_vec)(at >= end);
            scores[i] = (f32_vec)((~hidden & (u32_vec)scores[i]) | (hidden & (u32_vec)((f32_vec){0} - INFINITY)));
        }
    }
    f32_vec high = (f32_vec){0} - FLT_MAX;
    for (int i = 0; i < vecs; i++) high = max_vec(high, scores[i]);
    return max_f32(state[max_vec_of(args)][0], reduce_max(high) * score_scale(args));
}

/* Turns prepared scores into weights, which are multiplied by the scales of values if there are any. Returns what the
   earlier sums of the query shrink by. */
INLINE float softmax_tile(
    const attention_args *args, const f32_vec *scores, int vecs, float new_max, f32_vec *state, operand_t *weights,
    const float *value_scales
) {
    f32_vec totals[SUM_VECS] = {{0}}, *const sums = state + v_vecs(args), *const old_max = sums + SUM_VECS;
    const float scale = score_scale(args);
    for (int first = 0; first < vecs; first += SUM_VECS)
        for (int vec = 0, i = first; vec < SUM_VECS; vec++, i++) {
            const f32_vec weight = exp2_scalar(scores[i] * scale - new_max);
            totals[vec] += weight;
            store_operands(weights + i * LANES, value_scales ? weight * load_f32(value_scales + i * LANES) : weight);
        }
    const float shrink = exp2_f32((f32_vec){0} + ((*old_max)[0] - new_max))[0];
    for (int vec = 0; vec < SUM_VECS; vec++) sums[vec] = sums[vec] * shrink + totals[vec];
    (*old_max)[0] = new_max;
    return shrink;
}

/* Adds panels of a tile, whose first token is `begin`, to the states of `rows` queries. */
INLINE void attend_rows(
    const int rows, const attention_args *args, const operand_t *q, const panels *tile, int64_t count, int64_t begin,
    const context *seen, f32_vec *states
) {
    f32_vec scores[GEMM_ROWS][TILE_VECS];
    operand_t weights[GEMM_ROWS][TILE];
    float max[GEMM_ROWS], shrink[GEMM_ROWS];
    const int64_t state_row = state_vecs(args);
    score_rows(rows, tile, count, args->k_size, q, scores);
    const int vecs = count * PANEL / LANES;
    for (int r = 0; r < rows && tile->key_scales; r++)
        for (int i = 0; i < vecs; i++) scores[r][i] *= load_f32(tile->key_scales + i * LANES);
    for (int r = 0; r < rows; r++) /* of all rows first: each waits for the reduction of its vectors */
        max[r] = mask_scores(args, scores[r], vecs, begin, seen[r], states + r * state_row);
    for (int r = 0; r < rows; r++)
        shrink[r] = softmax_tile(args, scores[r], vecs, max[r], states + r * state_row, weights[r], tile->value_scales);
    weigh_rows(rows, tile, count, args->v_size, weights, shrink, states, state_row);
}

static void attend_some(
    int rows, const attention_args *args, const operand_t *q, const panels *tile, int64_t count, int64_t begin,
    const context *seen, f32_vec *states
) {
    switch (rows) {
        case 1: return attend_rows(1, args, q, tile, count, begin, seen, states);
        case 2: return attend_rows(2, args, q, tile, count, begin, seen, states);
        case 3: return attend_rows(3, args, q, tile, count, begin, seen, states);
        case 4: return attend_rows(4, args, q, tile, count, begin, seen, states);
        case 5: return attend_rows(5, args, q, tile, count, begin, seen, states);
        case 6: return attend_rows(6, args, q, tile, count, begin, seen, states);
    }
}

/* Adds them to the states of all of the task's queries of one KV head, as far as these see them. */
static void attend_tile(
    const attention_args *args, const task *t, int64_t kv_head, const operand_t *q, const panels *tile, int64_t begin,
    f32_vec *states
) {
    const int queries = t->tokens * args->group;
    int64_t token = t->token, in_group = 0;
    for (int i = 0, rows; i < queries; i += rows) {
        const int blocks = (queries - i + GEMM_ROWS - 1) / GEMM_ROWS;
        rows = (queries - i + blocks - 1) / blocks;
        context seen[GEMM_ROWS];
        for (int r = 0; r < rows; r++) {
            seen[r] = context_of(args, t->seq, token, kv_head * args->group + in_group);
            if (++in_group == args->group) in_group = 0, token++;
        }
        const int64_t count = min_i64((seen[rows - 1].end - begin + PANEL - 1) / PANEL, tile->count);
        if (count > 0 && seen[0].begin < begin + tile->count * PANEL)
            attend_some(rows, args, q + i * args->k_size, tile, count, begin, seen, states + i * state_vecs(args));
    }
}

/* Adds the state of later tokens to that of earlier ones. */
static inline void merge(const attention_args *args, f32_vec *state, const f32_vec *later) {
    const int64_t max = max_vec_of(args);
    const float top = max_f32(state[max][0], later[max][0]);
    const float a = exp2_f32((f32_vec){0} + (state[max][0] - top))[0];
    const float b = exp2_f32((f32_vec){0} + (later[max][0] - top))[0];
    for (int64_t i = 0; i < max; i++) state[i] = state[i] * a + later[i] * b;
    state[max][0] = top;
}

#endif
