/* Attention over the paged KV cache, for decodes and prompt chunks alike, which reads keys and values where they are.

   The softmax is computed online over tiles of the context. Sums are in float32; softmax weights are rounded to bfloat16
   where the CPU multiplies pairs of these.

   What a query gets depends on nothing but the tokens it sees: tiles, and splits of several tiles, begin at fixed
   positions of the sequence, and are added up in one order whichever thread computes them. */

#include <stdlib.h>

#include "attention_panels.h"
#include "attention_softmax.h"

#define SPLIT (4 * TILE) /* tokens; splits of one context may run in parallel */
#define TASK_QUERIES 192 /* how many share a tile; more if one token has more per KV head */

/* The memory of a thread. */
typedef struct {
    f32_vec *states, *split_states; /* [queries, state_vecs] */
    operand_t *q;                   /* [queries, k_size] */
    panel_copies copies;
} scratch;

static inline int64_t task_queries(const attention_args *args) { return max_i64(args->group, TASK_QUERIES); }

/* The splits that some query tokens see. */
static inline range visible_splits(const attention_args *args, const sequence *seq, int64_t token, int64_t tokens) {
    const int64_t begin = visible(args, seq, token).begin, end = visible(args, seq, token + tokens - 1).end;
    return (range){begin / SPLIT, (end + SPLIT - 1) / SPLIT};
}

/* The states of a task's queries after one split alone. */
static void attend_split(const attention_args *args, const task *t, int64_t split, scratch *s, f32_vec *states) {
    const int64_t queries = t->tokens * args->group, state_row = state_vecs(args);
    const range seen = {max_i64(visible(args, t->seq, t->token).begin, split * SPLIT),
                        min_i64(visible(args, t->seq, t->token + t->tokens - 1).end, (split + 1) * SPLIT)};
    memset(states, 0, queries * t->kv_heads * state_row * sizeof *states);
    for (int64_t i = 0; i < queries * t->kv_heads; i++) states[(i + 1) * state_row - 1][0] = -FLT_MAX;
    for (int64_t begin = seen.begin / PANEL * PANEL; begin < seen.end; begin = begin / TILE * TILE + TILE)
        for (int64_t i = 0; i < t->kv_heads; i++) {
            const panels tile = find_panels(args, t, t->kv_head + i, begin, seen, &s->copies);
            const operand_t *q = s->q + i * queries * args->k_size;
            attend_tile(args, t, t->kv_head + i, q, &tile, begin, states + i * queries * state_row);
        }
}

static void merge_all(const attention_args *args, const task *t, f32_vec *states, const f32_vec *later) {
    const int64_t state_row = state_vecs(args);
    for (int64_t i = 0; i < t->tokens * args->group * t->kv_heads; i++)
        merge(args, states + i * state_row, later + i * state_row);
}

/* Joins the sink to a finished state, and writes the output. */
static void write_output(const attention_args *args, f32_vec *state, int64_t token, int64_t head) {
    const int64_t vecs = v_vecs(args);
    if (args->sinks) {
        f32_vec sink[state_vecs(args)];
        memset(sink, 0, sizeof sink);
        sink[vecs][0] = 1;
        sink[max_vec_of(args)][0] = args->sinks[head] * LOG2_E;
        merge(args, state, sink);
    }
    const float sum = reduce_sums(state + vecs), scale = sum == 0 ? 0 : 1 / sum;
    scalar_t *output = args->output + (token * args->kv_heads * args->group + head) * args->v_size;
    for (int64_t i = 0; i < vecs; i++) store(output + i * LANES, state[i] * scale);
}

static void load_query(const attention_args *args, int64_t token, int64_t head, operand_t *to) {
    const scalar_t *q = args->q + token * args->q_token_stride + head * args->q_head_stride;
    const float *scales = args->key_scales ? args->key_scales + head / args->group * args->k_size : NULL;
    for (int64_t i = 0; i < args->k_size; i += LANES)
        store_operands(to + i, scales ? load(q + i) * load_f32(scales + i) : load(q + i));
}

/* Calls `body` with the `token` and `head` of each query of a task, in order, and its number `i`. */
#define FOR_QUERIES(args, t, body)                                                                                  \
    for (int64_t i = 0, kv_head = t->kv_head; kv_head < t->kv_head + t->kv_heads; kv_head++)                        \
        for (int64_t token = t->seq->query_start + t->token, n = 0; n < t->tokens; n++, token++)                    \
            for (int64_t head = kv_head * args->group; head < (kv_head + 1) * args->group; head++, i++) body;

static void finish(const attention_args *args, const task *t, f32_vec *states) {
    const int64_t state_row = state_vecs(args);
    FOR_QUERIES(args, t, write_output(args, states + i * state_row, token, head))
}

static void run_task(const attention_args *args, const task *t, scratch *s) {
    FOR_QUERIES(args, t, load_query(args, token, head, s->q + i * args->k_size))
    if (t->states) {
        attend_split(args, t, t->split, s, t->states);
        return;
    }
    const range splits = visible_splits(args, t->seq, t->token, t->tokens);
    attend_split(args, t, splits.begin, s, s->states);
    for (int64_t split = splits.begin + 1; split < splits.end; split++) {
        attend_split(args, t, split, s, s->split_states);
        merge_all(args, t, s->states, s->split_states);
    }
    finish(args, t, s->states);
}

/* If a task is the first split of its queries: merges the others into it. */
static void join_splits(const attention_args *args, const task *t, const task *end) {
    if (!t->states || t->split != visible_splits(args, t->seq, t->token, t->tokens).begin) return;
    for (const task *other = t + 1; other < end && other->seq == t->seq && other->split != t->split; other++)
        merge_all(args, t, t->states, other->states);
    finish(args, t, t->states);
}

/* The work of a sequence, in pairs of query and visible token. */
static double cost(const attention_args *args, const sequence *seq) {
    return (double)seq->query_len * min_i64(seq->seq_len, args->window + seq->query_len);
}

/* The tasks of a sequence, none of which should cost more than `max_cost`. Returns their number, adds the vectors that
   states of splits need to `*vecs`, and fills in `tasks` and moves `*states` past these states unless `tasks` is NULL. */
static int64_t make_tasks(
    const attention_args *args, const sequence *seq, double max_cost, task *tasks, f32_vec **states, int64_t *vecs
) {
    const int64_t max_tokens = task_queries(args) / args->group;
    const int64_t chunks = max_i64((seq->query_len + max_tokens - 1) / max_tokens, 1);
    const int64_t chunk = (seq->query_len + chunks - 1) / chunks;
    const range all = visible_splits(args, seq, 0, seq->query_len);
    const double head_cost = cost(args, seq) / chunks / args->kv_heads;
    const double split_cost = head_cost / max_i64(all.end - all.begin, 1);
    int64_t heads = min_i64(task_queries(args) / (args->group * chunk), args->kv_heads), count = 0;
    if (head_cost * heads > max_cost && split_cost * heads > max_cost) heads = 1;
    const int split = head_cost * heads > max_cost && chunks == 1; /* states of more would take much memory */
    for (int64_t i = chunks - 1; i >= 0; i--) {
        const int64_t token = i * chunk, tokens = min_i64(chunk, seq->query_len - token);
        const range splits = visible_splits(args, seq, token, tokens);
        const int several = split && splits.end - splits.begin > 1;
        for (int64_t head = 0; head < args->kv_heads; head += heads)
            for (int64_t s = splits.begin; s < (several ? splits.end : splits.begin + 1); s++, count++) {
                const int64_t task_heads = min_i64(heads, args->kv_heads - head);
                const int64_t state = several ? tokens * args->group * task_heads * state_vecs(args) : 0;
                *vecs += state;
                if (!tasks) continue;
                tasks[count] = (task){seq, token, tokens, head, task_heads, s, several ? *states : NULL};
                *states += state;
            }
    }
    return count;
}

static void run_tasks(const attention_args *args, const task *tasks, int64_t count, int any_split) {
    const int64_t queries = task_queries(args), copied_keys = args->is_coded ? TILE : 1;
    const int64_t copied_values = args->is_coded ? TILE : 2 * PANEL;
#pragma omp parallel num_threads(args->threads)
    {
        f32_vec states[2 * queries * state_vecs(args)] ALIGNED;
        operand_t q[queries * args->k_size] ALIGNED;
        scalar_t keys[copied_keys * args->k_size] ALIGNED;
        scalar_t values[copied_values * args->v_size] ALIGNED;
        float scales[2 * TILE] ALIGNED;
        scratch s = {states, states + queries * state_vecs(args), q, {keys, values, scales}};
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < count; i++) run_task(args, tasks + i, &s);
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < (any_split ? count : 0); i++) join_splits(args, tasks + i, tasks + count);
    }
}

/* All sequences of a step. Returns 0, or 1 if there is no memory. */
int EXPORT(paged_attention)(const attention_args *args) {
    double total = 0;
    int64_t count = 0, vecs = 0;
    for (int64_t i = 0; i < args->num_seqs; i++) total += cost(args, args->sequences + i);
    const double max_cost = total / args->threads / 2;
    for (int64_t i = 0; i < args->num_seqs; i++)
        count += make_tasks(args, args->sequences + i, max_cost, NULL, NULL, &vecs);
    task *tasks = malloc((count + 1) * sizeof *tasks);
    const int64_t lines = vecs * sizeof(f32_vec) / CACHE_LINE + 1; /* aligned_alloc takes whole ones */
    f32_vec *states = aligned_alloc(CACHE_LINE, lines * CACHE_LINE), *next = states;
    const int failed = !tasks || !states;
    if (!failed) {
        const int any_split = vecs > 0;
        count = 0;
        for (int64_t i = 0; i < args->num_seqs; i++)
            count += make_tasks(args, args->sequences + i, max_cost, tasks + count, &next, &vecs);
        run_tasks(args, tasks, count, any_split);
    }
    free(tasks);
    free(states);
    return failed;
}
