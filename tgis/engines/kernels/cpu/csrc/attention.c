/* Attention over the paged KV cache, for decodes and prompt chunks alike, which reads keys and values where they are.

   The softmax is computed online over tiles of the context. Sums are in float32; softmax weights are rounded to bfloat16
   where the CPU multiplies pairs of these.

   What a query gets depends on nothing but the tokens it sees: tiles, and splits of several tiles, begin at fixed
   positions of the sequence, and are added up in one order whichever thread computes them. */

#include <float.h>
#include <math.h>
#include <stdlib.h>

#include "attention_codes.h"

#define LOG2_E 1.44269504f
#define SPLIT (4 * TILE)  /* tokens; splits of one context may run in parallel */
#define PARALLEL_TOKENS 8 /* fewer new tokens are not worth waking the other threads */
#define TASK_QUERIES 192  /* how many share a tile; more if one token has more per KV head */

typedef struct {
    int64_t query_start, query_len, seq_len; /* tokens of this step, and all tokens up to its last */
    const int64_t *block_table;
} sequence;

typedef struct {
    const scalar_t *q;            /* [tokens, heads, k_size] */
    const void *k_cache, *v_cache; /* panels */
    scalar_t *output;             /* [tokens, heads, v_size] */
    const sequence *sequences;
    const float *sinks; /* [heads] or NULL */
    const float *bias;  /* [heads, bias_row] or NULL: added to scaled scores; of unseen keys, too */
    const float *key_scales; /* [kv_heads, k_size] or NULL: what queries are multiplied by */
    int64_t num_seqs, q_token_stride, q_head_stride;
    int64_t k_size, v_size; /* multiples of LANES */
    int64_t kv_heads, group, block_size; /* group: query heads per KV head; block_size: a multiple of PANEL */
    int64_t window;                      /* tokens that a token sees, itself included */
    int64_t bias_row, bias_origin;       /* the column of a token's own key; -1: columns are positions of keys */
    float scale, softcap;                /* softcap: 0 is none */
    int64_t is_coded;                    /* whether the cache has codes: see attention_codes.h */
    int64_t causal;                      /* 0: a token sees later ones, too; then there is no window */
    int64_t threads;
} attention_args;

/* Tokens of a sequence, from `begin` to before `end`. */
typedef struct {
    int64_t begin, end;
} range;

/* The tokens that a query sees, and what is added to its scores by token, or NULL. */
typedef struct {
    int64_t begin, end;
    const float *bias;
} context;

/* Some query tokens and KV heads of a sequence, over the whole context or one split of it. Its queries are ordered by
   KV head, token, head in the group. */
typedef struct {
    const sequence *seq;
    int64_t token, tokens, kv_head, kv_heads, split;
    f32_vec *states; /* where a split leaves its own; NULL for the whole context */
} task;

/* What a thread works with. The softmax state of a query is v_vecs vectors of values weighted by 2^(score - max), then
   the sum of these weights in each lane, then the max in lane 0. */
typedef struct {
    f32_vec *states, *split_states; /* [queries, state_vecs] */
    operand_t *q;                   /* [queries, k_size] */
    scalar_t *keys, *values;        /* a widened tile; without codes two panels of values that are not seen as a whole */
    float *scales;                  /* of keys and of values, [2, TILE] */
} scratch;

static inline int64_t v_vecs(const attention_args *args) { return args->v_size / LANES; }
static inline int64_t state_vecs(const attention_args *args) { return v_vecs(args) + 2; }
static inline int64_t task_queries(const attention_args *args) { return max_i64(args->group, TASK_QUERIES); }

static int64_t scratch_bytes(const attention_args *args) {
    const int64_t states = 2 * state_vecs(args) * sizeof(f32_vec), q = args->k_size * sizeof(operand_t);
    const int64_t tile = TILE * ((args->k_size + args->v_size) * sizeof(scalar_t) + 2 * sizeof(float));
    return task_queries(args) * (states + q) + (args->is_coded ? tile : 2 * PANEL * args->v_size * (int64_t)sizeof(scalar_t));
}

static scratch make_scratch(const attention_args *args, char *memory) {
    scratch s;
    s.states = (f32_vec *)memory;
    s.split_states = s.states + task_queries(args) * state_vecs(args);
    s.q = (operand_t *)(s.split_states + task_queries(args) * state_vecs(args));
    s.keys = (scalar_t *)(s.q + task_queries(args) * args->k_size);
    s.values = s.keys + (args->is_coded ? TILE * args->k_size : 0);
    s.scales = (float *)(s.values + TILE * args->v_size);
    return s;
}

/* Where the panel of a token is in a cache, counted in tokens of one head. */
static inline int64_t panel_slot(
    int64_t kv_heads, int64_t block_size, int64_t block, int64_t kv_head, int64_t token_in_block
) {
    return (block * kv_heads + kv_head) * block_size + token_in_block / PANEL * PANEL;
}

/* The position of a query token in its sequence. */
static inline int64_t position(const sequence *seq, int64_t token) { return seq->seq_len - seq->query_len + token; }

/* The context that a query token sees. */
static inline range visible(const attention_args *args, const sequence *seq, int64_t token) {
    const int64_t end = args->causal ? position(seq, token) + 1 : seq->seq_len;
    return (range){max_i64(end - args->window, 0), end};
}

/* The context of a query token for one head. */
static inline context context_of(const attention_args *args, const sequence *seq, int64_t token, int64_t head) {
    const range seen = visible(args, seq, token);
    const int64_t first = args->bias_origin < 0 ? 0 : args->bias_origin - position(seq, token);
    return (context){seen.begin, seen.end, args->bias ? args->bias + head * args->bias_row + first : NULL};
}

/* The splits that some query tokens see. */
static inline range visible_splits(const attention_args *args, const sequence *seq, int64_t token, int64_t tokens) {
    const int64_t begin = visible(args, seq, token).begin, end = visible(args, seq, token + tokens - 1).end;
    return (range){begin / SPLIT, (end + SPLIT - 1) / SPLIT};
}

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
            const f32_vec x = scores[i] * (args->scale * (cap == 0 ? LOG2_E : 1 / cap));
            scores[i] = cap == 0 ? x : cap * LOG2_E * tanh_f32(x);
            if (seen.bias) scores[i] += LOG2_E * load_f32(seen.bias + begin + i * LANES);
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
    return max_f32(state[v_vecs(args) + 1][0], reduce_max(high) * score_scale(args));
}

/* Turns prepared scores into weights, which are multiplied by the scales of values if there are any. Returns what the
   earlier sums of the query shrink by. */
INLINE float softmax_tile(
    const attention_args *args, const f32_vec *scores, int vecs, float new_max, f32_vec *state, operand_t *weights,
    const float *value_scales
) {
    f32_vec total = {0}, *const sum = state + v_vecs(args), *const old_max = sum + 1;
    const float scale = score_scale(args);
    for (int i = 0; i < vecs; i++) {
        const f32_vec weight = exp2_scalar(scores[i] * scale - new_max);
        total += weight;
        store_operands(weights + i * LANES, value_scales ? weight * load_f32(value_scales + i * LANES) : weight);
    }
    const float shrink = exp2_f32((f32_vec){0} + ((*old_max)[0] - new_max))[0];
    *sum = *sum * shrink + total;
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

/* The panel that is widened a tile after that of a token: of the next head or, after the last one, of later tokens. */
static int64_t later_slot(const attention_args *args, const task *t, int64_t kv_head, int64_t token) {
    const int is_last = kv_head + 1 == t->kv_head + t->kv_heads;
    const int64_t next = is_last ? min_i64(token + TILE, t->seq->seq_len - 1) : token, size = args->block_size;
    const int64_t block = t->seq->block_table[next / size];
    return panel_slot(args->kv_heads, size, block, is_last ? t->kv_head : kv_head + 1, next % size);
}

/* Widens panels of codes, and adds them to those found. */
static void add_widened(
    const attention_args *args, const task *t, int64_t kv_head, int64_t token, int64_t slot, range seen, panels *found,
    scratch *s
) {
    const int64_t at = found->count * PANEL, k_size = args->k_size, v_size = args->v_size;
    const int64_t later = later_slot(args, t, kv_head, token);
    const char *keys = panel_of(args->k_cache, args->is_coded, k_size, slot);
    const char *values = panel_of(args->v_cache, args->is_coded, v_size, slot);
    found->keys[found->count] = s->keys + at * k_size;
    found->values[found->count] = s->values + at * v_size;
    const char *later_keys = panel_of(args->k_cache, args->is_coded, k_size, later);
    const char *later_values = panel_of(args->v_cache, args->is_coded, v_size, later);
    widen_panel(keys, k_size / QUAD, PANEL, later_keys, s->keys + at * k_size, s->scales + at);
    widen_panel(values, PANEL / QUAD, v_size, later_values, s->values + at * v_size, s->scales + TILE + at);
    for (int64_t i = 0; i < PANEL; i++)
        if (token + i < seen.begin || token + i >= seen.end) s->scales[TILE + at + i] = 0; /* NaN times 0 is NaN */
    found->key_scales = s->scales;
    found->value_scales = s->scales + TILE;
}

/* The panels of one KV head from `begin` on, up to the end of its tile or of what is seen. */
static panels find_panels(
    const attention_args *args, const task *t, int64_t kv_head, int64_t begin, range seen, scratch *s
) {
    const int has_next = !args->is_coded && kv_head + 1 < t->kv_head + t->kv_heads;
    panels found = {.next_keys = has_next ? args->block_size * args->k_size : 0};
    const int64_t end = min_i64(begin / TILE * TILE + TILE, seen.end);
    for (int64_t token = begin; token < end; token += PANEL, found.count++) {
        const uint32_t size = args->block_size, block = (uint32_t)token / size, in_block = (uint32_t)token % size;
        const int64_t slot = panel_slot(args->kv_heads, size, t->seq->block_table[block], kv_head, in_block);
        if (args->is_coded) {
            add_widened(args, t, kv_head, token, slot, seen, &found, s);
            continue;
        }
        const scalar_t *values = (const scalar_t *)args->v_cache + slot * args->v_size;
        if (token < seen.begin || token + PANEL > seen.end) {
            scalar_t *copy = s->values + (token < seen.begin ? 0 : PANEL * args->v_size);
            copy_seen(values, args->v_size, seen.begin - token, seen.end - token, copy);
            values = copy;
        }
        found.keys[found.count] = (const scalar_t *)args->k_cache + slot * args->k_size;
        found.values[found.count] = values;
    }
    return found;
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
            const panels tile = find_panels(args, t, t->kv_head + i, begin, seen, s);
            const operand_t *q = s->q + i * queries * args->k_size;
            attend_tile(args, t, t->kv_head + i, q, &tile, begin, states + i * queries * state_row);
        }
}

/* Adds the state of later tokens to that of earlier ones. */
static inline void merge(const attention_args *args, f32_vec *state, const f32_vec *later) {
    const int64_t sum = v_vecs(args), max = sum + 1;
    const float top = max_f32(state[max][0], later[max][0]);
    const float a = exp2_f32((f32_vec){0} + (state[max][0] - top))[0];
    const float b = exp2_f32((f32_vec){0} + (later[max][0] - top))[0];
    for (int64_t i = 0; i <= sum; i++) state[i] = state[i] * a + later[i] * b;
    state[max][0] = top;
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
        f32_vec sink[vecs + 2];
        memset(sink, 0, sizeof sink);
        sink[vecs][0] = 1;
        sink[vecs + 1][0] = args->sinks[head] * LOG2_E;
        merge(args, state, sink);
    }
    const float sum = reduce_add(state[vecs]), scale = sum == 0 ? 0 : 1 / sum;
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
    const int64_t bytes = scratch_bytes(args);
#pragma omp parallel num_threads(args->threads)
    {
        char memory[bytes] __attribute__((aligned(CACHE_LINE)));
        scratch s = make_scratch(args, memory);
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

typedef struct {
    const scalar_t *k, *v; /* [tokens, kv_heads, k_size or v_size] */
    void *k_cache, *v_cache;
    const int64_t *slot_mapping; /* [tokens], counted in tokens */
    const float *key_scales;     /* [kv_heads, k_size] or NULL: what keys are divided by */
    int64_t tokens, kv_heads, block_size, k_size, v_size;
    int64_t k_token_stride, k_head_stride, v_token_stride, v_head_stride, is_coded, threads;
} write_args;

/* Where the panel of a new token is. */
static inline int64_t slot_of(const write_args *args, int64_t token, int64_t kv_head) {
    const int64_t slot = args->slot_mapping[token], size = args->block_size;
    return panel_slot(args->kv_heads, size, slot / size, kv_head, slot % size);
}

/* Writes numbers of some bytes, as many side by side as `pair` says, to their places in the panels of token `at`; fetches
   the lines of `next`. */
INLINE void scatter(
    const int bytes, const int pair, const write_args *args, int64_t at, const void *k, const void *v, char *keys, char *values,
    const char *next
) {
    const int64_t k_size = args->k_size, v_size = args->v_size;
    keys += at * pair * bytes;
    values += (at / pair * pair * v_size + at % pair) * bytes;
    for (int64_t i = 0; i < k_size; i += pair) {
        __builtin_prefetch(next + i * PANEL * bytes, 1);
        memcpy(keys + i * PANEL * bytes, (const char *)k + i * bytes, pair * bytes);
    }
    for (int64_t i = 0; i < v_size; i++) memcpy(values + i * pair * bytes, (const char *)v + i * bytes, bytes);
}

/* Writes the keys and values of new tokens to their slots in the cache; each head fetches the lines of the next token. */
void EXPORT(write_kv_cache)(const write_args *args) {
    const int64_t k_size = args->k_size, v_size = args->v_size, is_coded = args->is_coded;
#pragma omp parallel for schedule(static) num_threads(args->threads) if (args->tokens >= PARALLEL_TOKENS)
    for (int64_t t = 0; t < args->tokens; t++)
        for (int64_t head = 0; head < args->kv_heads; head++) {
            const int64_t slot = slot_of(args, t, head), at = args->slot_mapping[t] % PANEL;
            const int64_t next = slot_of(args, min_i64(t + 1, args->tokens - 1), head);
            const scalar_t *k = args->k + t * args->k_token_stride + head * args->k_head_stride;
            const scalar_t *v = args->v + t * args->v_token_stride + head * args->v_head_stride;
            char *keys = (char *)panel_of(args->k_cache, is_coded, k_size, slot);
            char *values = (char *)panel_of(args->v_cache, is_coded, v_size, slot);
            const char *next_keys = panel_of(args->k_cache, is_coded, k_size, next);
            if (is_coded) {
                uint8_t new_keys[k_size], new_values[v_size];
                const float *scales = args->key_scales ? args->key_scales + head * k_size : NULL;
                *scale_of(keys, k_size, at) = quantize(k, k_size, scales, new_keys);
                *scale_of(values, v_size, at) = quantize(v, v_size, NULL, new_values);
                scatter(1, QUAD, args, at, new_keys, new_values, keys, values, next_keys);
            } else scatter(sizeof *k, PAIR, args, at, k, v, keys, values, next_keys);
        }
}
