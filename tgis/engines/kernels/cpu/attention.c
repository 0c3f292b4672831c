/* Attention over the paged KV cache, for decodes and prompt chunks alike, without copying a sequence's context.

   Keys and values are packed tile by tile for a small GEMM, and the softmax is computed online over the tiles. Sums are
   in float32; softmax weights are rounded to bfloat16 where the CPU multiplies pairs of these.

   What a query gets depends on nothing but the tokens it sees: tiles, and splits of several tiles, begin at fixed
   positions of the sequence, and are added up in one order whichever thread computes them. */

#include <float.h>
#include <math.h>
#include <stdlib.h>

#include "attention_tile.h"

#define CACHE_LINE 64         /* bytes */
#define LOG2_E 1.44269504f
#define SPLIT (4 * TILE)      /* tokens; splits of one context may run in parallel */
#define TASK_QUERIES 192      /* how many share a packed tile; more if one token has more per KV head */
#define TILE_BYTES (128 << 10) /* KV heads are packed together while they fit: memory is read in longer runs */

typedef struct {
    int64_t query_start, query_len, seq_len; /* tokens of this step, and all tokens up to its last */
    const int64_t *block_table;
} sequence;

typedef struct {
    const scalar_t *q, *k_cache, *v_cache; /* [tokens, heads, k_size]; [blocks, block_size, kv_heads, k_size or v_size] */
    scalar_t *output;                      /* [tokens, heads, v_size] */
    const sequence *sequences;
    const float *sinks; /* [heads] or NULL */
    int64_t num_seqs, q_token_stride, q_head_stride;
    int64_t k_size, v_size; /* multiples of LANES */
    int64_t kv_heads, group, block_size; /* group: query heads per KV head */
    int64_t window;                      /* tokens that a token sees, itself included */
    float scale, softcap;                /* softcap: 0 is none */
    int64_t threads;
} attention_args;

/* Tokens of a sequence, from `begin` to before `end`. */
typedef struct {
    int64_t begin, end;
} range;

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
    u32_vec *keys, *values; /* packed tiles [KV heads], each [TILE / LANES, k_cells] and [TILE / PAIR, v_vecs] */
    cell *q;               /* [queries, k_cells] */
    f32_vec *states, *split_states; /* [queries, state_vecs] */
    scalar_t *gathered;    /* [LANES, k_size or v_size] */
} scratch;

static inline int64_t k_cells(const attention_args *args) { return args->k_size / PAIR; }
static inline int64_t v_vecs(const attention_args *args) { return args->v_size / LANES; }
static inline int64_t state_vecs(const attention_args *args) { return v_vecs(args) + 2; }
static inline int64_t key_tile_vecs(const attention_args *args) { return TILE / LANES * k_cells(args); }
static inline int64_t value_tile_vecs(const attention_args *args) { return TILE / PAIR * v_vecs(args); }
static inline int64_t task_queries(const attention_args *args) { return max_i64(args->group, TASK_QUERIES); }

static inline int64_t packed_heads(const attention_args *args) {
    const int64_t bytes = (key_tile_vecs(args) + value_tile_vecs(args)) * sizeof(u32_vec);
    return max_i64(min_i64(TILE_BYTES / bytes, args->kv_heads), 1);
}

static int64_t scratch_bytes(const attention_args *args) {
    const int64_t tiles = packed_heads(args) * (key_tile_vecs(args) + value_tile_vecs(args)) * sizeof(u32_vec);
    const int64_t states = 2 * state_vecs(args) * sizeof(f32_vec), q = k_cells(args) * sizeof(cell);
    return tiles + task_queries(args) * (states + q) + LANES * max_i64(args->k_size, args->v_size) * sizeof(scalar_t);
}

static scratch make_scratch(const attention_args *args, char *memory) {
    scratch s;
    s.keys = (u32_vec *)memory;
    s.values = s.keys + packed_heads(args) * key_tile_vecs(args);
    s.states = (f32_vec *)(s.values + packed_heads(args) * value_tile_vecs(args));
    s.split_states = s.states + task_queries(args) * state_vecs(args);
    s.q = (cell *)(s.split_states + task_queries(args) * state_vecs(args));
    s.gathered = (scalar_t *)(s.q + task_queries(args) * k_cells(args));
    return s;
}

/* Where a token of a sequence is in the cache, counted in tokens. */
static inline int64_t slot_of(const attention_args *args, const sequence *seq, uint32_t token) {
    const uint32_t block_size = args->block_size;
    return seq->block_table[token / block_size] * block_size + token % block_size;
}

/* The context that a query token sees. */
static inline range visible(const attention_args *args, const sequence *seq, int64_t token) {
    const int64_t end = seq->seq_len - seq->query_len + token + 1;
    return (range){max_i64(end - args->window, 0), end};
}

/* The splits that some query tokens see. */
static inline range visible_splits(const attention_args *args, const sequence *seq, int64_t token, int64_t tokens) {
    const int64_t begin = visible(args, seq, token).begin, end = visible(args, seq, token + tokens - 1).end;
    return (range){begin / SPLIT, (end + SPLIT - 1) / SPLIT};
}

/* Turns the scores of a query over a tile into weights, and returns what its earlier sums shrink by. */
INLINE float softmax_tile(
    const attention_args *args, f32_vec *scores, int panels, int64_t tile, range seen, f32_vec *state, cell *weights
) {
    const u32_vec lanes = LANE_INDEX;
    const int unmasked = seen.begin <= tile && seen.end >= tile + panels * LANES;
    const uint32_t begin = max_i64(seen.begin - tile, 0), end = max_i64(seen.end - tile, 0);
    const float cap = args->softcap;
    f32_vec high = (f32_vec){0} - FLT_MAX, total = {0};
    for (int p = 0; p < panels; p++) {
        f32_vec x = scores[p] * (args->scale * (cap == 0 ? LOG2_E : 1 / cap));
        if (cap != 0) x = cap * LOG2_E * tanh_f32(x);
        if (!unmasked) {
            u32_vec at = lanes + p * LANES, hidden = (u32_vec)(at < begin) | (u32_vec)(at >= end);
            x = (f32_vec)((~hidden & (u32_vec)x) | (hidden & (u32_vec)((f32_vec){0} - INFINITY)));
        }
        high = max_vec(high, x);
        scores[p] = x;
    }
    f32_vec *const sum = state + v_vecs(args), *const old_max = sum + 1;
    const float new_max = max_f32((*old_max)[0], reduce_max(high));
    for (int p = 0; p < panels; p++) {
        f32_vec weight = exp2_nonpositive(scores[p] - new_max);
        total += weight;
#if PAIR == 2
        u16_vec bits = to_bf16(weight);
        memcpy(weights + p * LANES / PAIR, &bits, sizeof bits);
#else
        memcpy(weights + p * LANES / PAIR, &weight, sizeof weight);
#endif
    }
    const float shrink = exp2_nonpositive((f32_vec){0} + ((*old_max)[0] - new_max))[0];
    *sum = *sum * shrink + total;
    (*old_max)[0] = new_max;
    return shrink;
}

/* Adds a tile of one KV head to the states of `rows` of its queries. */
INLINE void attend_rows(
    const int rows, const attention_args *args, const cell *q, const u32_vec *keys, const u32_vec *values, int panels,
    int64_t tile, const range *seen, f32_vec *states
) {
    f32_vec scores[GEMM_ROWS][TILE / LANES];
    cell weights[GEMM_ROWS][TILE / PAIR];
    float shrink[GEMM_ROWS];
    const int64_t key_cells = k_cells(args), value_vecs = v_vecs(args), state_row = state_vecs(args);
    gemm_rows(rows, panels, key_cells, q, key_cells, keys, 1, key_cells, scores[0], TILE / LANES, NULL);
    for (int r = 0; r < rows; r++)
        shrink[r] = softmax_tile(args, scores[r], panels, tile, seen[r], states + r * state_row, weights[r]);
    gemm_rows(
        rows, value_vecs, panels * LANES / PAIR, weights[0], TILE / PAIR, values, value_vecs, 1, states, state_row, shrink
    );
}

static void attend_some(
    int rows, const attention_args *args, const cell *q, const u32_vec *keys, const u32_vec *values, int panels,
    int64_t tile, const range *seen, f32_vec *states
) {
    switch (rows) {
        case 1: return attend_rows(1, args, q, keys, values, panels, tile, seen, states);
        case 2: return attend_rows(2, args, q, keys, values, panels, tile, seen, states);
        case 3: return attend_rows(3, args, q, keys, values, panels, tile, seen, states);
        case 4: return attend_rows(4, args, q, keys, values, panels, tile, seen, states);
        case 5: return attend_rows(5, args, q, keys, values, panels, tile, seen, states);
        case 6: return attend_rows(6, args, q, keys, values, panels, tile, seen, states);
    }
}

/* Adds a tile of one KV head to the states of all of the task's queries of that head. */
static void attend_tile(
    const attention_args *args, const task *t, const cell *q, const u32_vec *keys, const u32_vec *values, int64_t tile,
    f32_vec *states
) {
    const int queries = t->tokens * args->group;
    int64_t token = t->token, in_group = 0;
    for (int i = 0, rows; i < queries; i += rows) {
        const int blocks = (queries - i + GEMM_ROWS - 1) / GEMM_ROWS;
        rows = (queries - i + blocks - 1) / blocks;
        range seen[GEMM_ROWS];
        for (int r = 0; r < rows; r++) {
            seen[r] = visible(args, t->seq, token);
            if (++in_group == args->group) in_group = 0, token++;
        }
        const int64_t count = min_i64(seen[rows - 1].end - tile, TILE);
        if (count > 0 && seen[0].begin < tile + TILE)
            attend_some(
                rows, args, q + i * k_cells(args), keys, values, (count + LANES - 1) / LANES, tile, seen,
                states + i * state_vecs(args)
            );
    }
}

/* memcpy of some multiple of LANES, which is rarely long enough for a call of it. */
INLINE void copy_vecs(scalar_t *to, const scalar_t *from, int64_t size) {
    for (int64_t i = 0; i < size; i += LANES) memcpy(to + i, from + i, LANES * sizeof *to);
}

/* Copies one head of LANES tokens from `first` on; zeros for those outside of `seen`. */
static void gather(
    const attention_args *args, const scalar_t *cache, int64_t size, const sequence *seq, int64_t head, int64_t first,
    range seen, scalar_t *to
) {
    memset(to, 0, LANES * size * sizeof *to);
    for (int64_t t = max_i64(first, seen.begin); t < min_i64(first + LANES, seen.end); t++)
        copy_vecs(to + (t - first) * size, cache + (slot_of(args, seq, t) * args->kv_heads + head) * size, size);
}

/* Packs LANES tokens from `first` on, of all KV heads of the task, as panel `panel` of their tiles. */
static void pack_panel(const attention_args *args, const task *t, int64_t first, range seen, int panel, scratch *s) {
    const int64_t k_size = args->k_size, v_size = args->v_size;
    const int64_t k_stride = args->kv_heads * k_size, v_stride = args->kv_heads * v_size; /* of tokens */
    const int aligned = args->block_size % LANES == 0; /* then the tokens are side by side */
    const int direct = aligned && first >= seen.begin && first + LANES <= seen.end;
    const int64_t slot = direct ? slot_of(args, t->seq, first) : 0;
    const int64_t next = aligned && first + LANES < seen.end ? slot_of(args, t->seq, first + LANES) : slot;
    for (int64_t i = 0; i < t->kv_heads; i++) {
        const int64_t head = t->kv_head + i;
        const scalar_t *k = args->k_cache + slot * k_stride + head * k_size;
        const scalar_t *v = args->v_cache + slot * v_stride + head * v_size;
        const scalar_t *next_k = args->k_cache + next * k_stride + head * k_size;
        const scalar_t *next_v = args->v_cache + next * v_stride + head * v_size;
        u32_vec *keys = s->keys + i * key_tile_vecs(args) + panel * k_cells(args);
        u32_vec *values = s->values + i * value_tile_vecs(args) + panel * (LANES / PAIR) * v_vecs(args);
        if (!direct) gather(args, args->k_cache, k_size, t->seq, head, first, seen, s->gathered);
        pack_keys(direct ? k : s->gathered, direct ? k_stride : k_size, k_size, next_k, k_stride, keys);
        if (!direct) gather(args, args->v_cache, v_size, t->seq, head, first, seen, s->gathered);
        pack_values(direct ? v : s->gathered, direct ? v_stride : v_size, v_size, next_v, v_stride, values);
    }
}

/* The states of a task's queries after one split alone. */
static void attend_split(const attention_args *args, const task *t, int64_t split, scratch *s, f32_vec *states) {
    const int64_t queries = t->tokens * args->group, state_row = state_vecs(args);
    const range seen = {max_i64(visible(args, t->seq, t->token).begin, split * SPLIT),
                        min_i64(visible(args, t->seq, t->token + t->tokens - 1).end, (split + 1) * SPLIT)};
    memset(states, 0, queries * t->kv_heads * state_row * sizeof *states);
    for (int64_t i = 0; i < queries * t->kv_heads; i++) states[(i + 1) * state_row - 1][0] = -FLT_MAX;
    for (int64_t tile = seen.begin / TILE * TILE; tile < seen.end; tile += TILE) {
        for (int64_t first = tile; first < min_i64(tile + TILE, seen.end); first += LANES)
            pack_panel(args, t, first, seen, (first - tile) / LANES, s);
        for (int64_t i = 0; i < t->kv_heads; i++)
            attend_tile(
                args, t, s->q + i * queries * k_cells(args), s->keys + i * key_tile_vecs(args),
                s->values + i * value_tile_vecs(args), tile, states + i * queries * state_row
            );
    }
}

/* Adds the state of later tokens to that of earlier ones. */
static inline void merge(const attention_args *args, f32_vec *state, const f32_vec *later) {
    const int64_t sum = v_vecs(args), max = sum + 1;
    const float top = max_f32(state[max][0], later[max][0]);
    const float a = exp2_nonpositive((f32_vec){0} + (state[max][0] - top))[0];
    const float b = exp2_nonpositive((f32_vec){0} + (later[max][0] - top))[0];
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

static void load_query(const attention_args *args, int64_t token, int64_t head, cell *to) {
    const scalar_t *q = args->q + token * args->q_token_stride + head * args->q_head_stride;
#if BF16 && PAIR == 1
    for (int64_t i = 0; i < args->k_size; i += LANES) {
        f32_vec x = load(q + i);
        memcpy(to + i, &x, sizeof x);
    }
#else
    copy_vecs((scalar_t *)to, q, args->k_size);
#endif
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
    const int64_t key_cells = k_cells(args);
    FOR_QUERIES(args, t, load_query(args, token, head, s->q + i * key_cells))
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
    int64_t heads = min_i64(task_queries(args) / (args->group * chunk), packed_heads(args)), count = 0;
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

/* Writes the keys and values of new tokens to their slots in the cache, which are counted in tokens. The strides are
   those of k [tokens, kv_heads, k_size] and v [tokens, kv_heads, v_size]. */
void EXPORT(write_kv_cache)(
    const scalar_t *k, const scalar_t *v, scalar_t *k_cache, scalar_t *v_cache, const int64_t *slot_mapping,
    int64_t tokens, int64_t kv_heads, int64_t k_size, int64_t v_size, int64_t k_token_stride, int64_t k_head_stride,
    int64_t v_token_stride, int64_t v_head_stride
) {
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t head = 0; head < kv_heads; head++) {
            const int64_t to = slot_mapping[t] * kv_heads + head;
            copy_vecs(k_cache + to * k_size, k + t * k_token_stride + head * k_head_stride, k_size);
            copy_vecs(v_cache + to * v_size, v + t * v_token_stride + head * v_head_stride, v_size);
        }
}
