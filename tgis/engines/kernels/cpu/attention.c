/* Attention over the paged KV cache on CPUs, for rows with one or more new tokens; no copy of a row's context is made.

   cpu_attention.py has this compiled when an engine starts, for the processor at hand and one shape: HALF says whether
   the numbers are bfloat16 or float32; K_SIZE and V_SIZE are the sizes of a key and of a value, multiples of LANES;
   GROUP query heads share each of KV_HEADS heads; BLOCK tokens make a block. Sums are in float32; the
   weights of values are bfloat16 where the processor multiplies pairs of these.

   What a token gets depends on nothing but what it sees: keys are taken in tiles, and tiles in spans, that begin at the
   same places of a row however many tokens are new, and are summed in one order whoever does it. */

#include <float.h>
#include <stdlib.h>

#include "tiles.h"

#define LINE 64 /* bytes */
#define LOG2_E 1.44269504f
#define SPAN (4 * KEYS)                  /* tokens whose sum may be a task of its own */
#define MOST (GROUP > 192 ? GROUP : 192) /* queries that share a packed tile */

/* KV heads that are packed together at most, in 128 KiB or one by one: memory is read in longer pieces. */
#define FITTING ((128 << 10) / (4 * KEYS * (K_SIZE + V_SIZE) / PAIR))
#define HEADS (FITTING < 1 ? 1 : FITTING < KV_HEADS ? FITTING : KV_HEADS)

typedef struct {
    int64_t first, count, length; /* its new tokens in the step, and all its tokens */
    const int64_t *table;         /* its blocks */
} row;

typedef struct {
    const number *q, *keys, *values; /* [tokens, heads, K_SIZE] by strides, [blocks, BLOCK, KV_HEADS, K_ or V_SIZE] */
    number *output;                  /* [tokens, heads, V_SIZE] */
    const row *rows;
    const float *sinks;             /* [heads], or none */
    int64_t count, q_token, q_head; /* rows; strides */
    int64_t window;                 /* tokens that are seen */
    float scale, softcap;           /* softcap: 0 for none */
    int64_t threads;
} work;

/* What a query has seen so far: the sum of values by weight 2^(score - top), and of the weights, lane by lane. */
typedef struct {
    wide mixed[V_WIDTH], total;
    float top;
} state;

/* Some tokens of a row and some KV heads, over all of the context or one span of it. */
typedef struct {
    const row *row;
    int64_t token, tokens, head, heads, span;
    state *states; /* where those of a span are left */
} task;

typedef struct {
    tile tiles[HEADS];
    cell q[MOST][K_CELLS];
    wide scores[ROWS][KEYS / LANES];
    cell weights[ROWS][KEYS / PAIR];
    state sums[MOST], parts[MOST];
} scratch;

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t largest(int64_t a, int64_t b) { return a > b ? a : b; }

/* Where a token of a row is in the cache, counted in tokens. */
static inline int64_t place(const row *r, int64_t t) {
    return r->table[t / BLOCK] * BLOCK + t % BLOCK;
}

/* How a query sees a tile: from `begin` to before `end`, in places of the row. */
typedef struct {
    int64_t begin, end;
} view;

/* From products to weights, which go to `weights`; what was summed before shrinks by the result. */
static inline float weigh(const work *w, wide *scores, int panels, int64_t tile, view seen, state *sum, cell *weights) {
    const words lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const int whole = seen.begin <= tile && seen.end >= tile + panels * LANES;
    const uint32_t begin = largest(seen.begin - tile, 0), end = largest(seen.end - tile, 0);
    const float cap = w->softcap;
    wide high = (wide){0} - FLT_MAX, total = {0};
    for (int p = 0; p < panels; p++) {
        wide x = scores[p] * (w->scale * (cap == 0 ? LOG2_E : 1 / cap));
        if (cap != 0) x = cap * LOG2_E * tanh_of(x);
        if (!whole) {
            words at = lanes + p * LANES, hidden = (words)(at < begin) | (words)(at >= end);
            x = (wide)((~hidden & (words)x) | (hidden & (words)((wide){0} - INFINITY)));
        }
        high = larger(high, x);
        scores[p] = x;
    }
    const float top = fmaxf(sum->top, maximum(high));
    for (int p = 0; p < panels; p++) {
        wide weight = power(scores[p] - top);
        total += weight;
#if PAIR == 2
        halves bits = rounded(weight);
        memcpy(weights + p * LANES / PAIR, &bits, sizeof bits);
#else
        memcpy(weights + p * LANES / PAIR, &weight, sizeof weight);
#endif
    }
    const float shrink = power((wide){0} + (sum->top - top))[0];
    sum->total = sum->total * shrink + total;
    sum->top = top;
    return shrink;
}

/* Some queries of one KV head, not more than ROWS, over the tile from `start` on. */
static inline __attribute__((always_inline)) void absorb_some(
    const int rows, const work *w, scratch *s, const tile *packed, const cell *q, int panels, int64_t start,
    const view *seen, state *sums) {
    float shrink[ROWS];
    products(rows, panels, K_CELLS, q, K_CELLS, packed->keys[0], 1, K_CELLS, s->scores[0], KEYS / LANES, NULL);
    for (int r = 0; r < rows; r++)
        shrink[r] = weigh(w, s->scores[r], panels, start, seen[r], sums + r, s->weights[r]);
    products(rows, V_WIDTH, panels * LANES / PAIR, s->weights[0], KEYS / PAIR, packed->values[0], V_WIDTH, 1,
             sums->mixed, sizeof(state) / sizeof(wide), shrink);
}

static void absorb(int rows, const work *w, scratch *s, const tile *packed, const cell *q, int panels, int64_t start,
                   const view *seen, state *sums) {
    switch (rows) {
        case 1: absorb_some(1, w, s, packed, q, panels, start, seen, sums); break;
        case 2: absorb_some(2, w, s, packed, q, panels, start, seen, sums); break;
        case 3: absorb_some(3, w, s, packed, q, panels, start, seen, sums); break;
        case 4: absorb_some(4, w, s, packed, q, panels, start, seen, sums); break;
        case 5: absorb_some(5, w, s, packed, q, panels, start, seen, sums); break;
        case 6: absorb_some(6, w, s, packed, q, panels, start, seen, sums); break;
    }
}

/* What a token of a row sees. */
static inline view sight(const work *w, const row *r, int64_t token) {
    const int64_t end = r->length - r->count + token + 1;
    return (view){largest(end - w->window, 0), end};
}

/* All queries of a KV head of a task over a tile. */
static void absorb_tile(const work *w, const task *t, int64_t start, scratch *s, const tile *packed, const cell *q,
                        state *sums) {
    const int queries = t->tokens * GROUP;
    for (int i = 0, some; i < queries; i += some) {
        const int blocks = (queries - i + ROWS - 1) / ROWS;
        some = (queries - i + blocks - 1) / blocks;
        view seen[ROWS];
        for (int r = 0; r < some; r++) seen[r] = sight(w, t->row, t->token + (i + r) / GROUP);
        const int64_t count = least(seen[some - 1].end - start, KEYS);
        if (count > 0 && seen[0].begin < start + KEYS)
            absorb(some, w, s, packed, q + i * K_CELLS, (count + LANES - 1) / LANES, start, seen, sums + i);
    }
}

/* A head of LANES tokens, zeros for those that are not seen. */
static void gather(const number *states, int size, const row *r, int64_t head, int64_t from, view seen, number *to) {
    memset(to, 0, LANES * size * sizeof *to);
    for (int64_t t = largest(from, seen.begin); t < least(from + LANES, seen.end); t++)
        memcpy(to + (t - from) * size, states + (place(r, t) * KV_HEADS + head) * size, size * sizeof *to);
}

/* LANES tokens of all heads of a task, which are those from panel `p` on of their tiles. */
static void pack(const work *w, const task *t, int64_t from, view seen, int p, tile *tiles) {
    const int aligned = BLOCK % LANES == 0;
    const int whole = aligned && from >= seen.begin && from + LANES <= seen.end;
    const int64_t at = whole ? place(t->row, from) * KV_HEADS + t->head : 0;
    const int follows = aligned && from + LANES < seen.end;
    const int64_t next = follows ? place(t->row, from + LANES) * KV_HEADS + t->head : at;
    for (int64_t head = 0; head < t->heads; head++) {
        const number *next_k = w->keys + (next + head) * K_SIZE, *next_v = w->values + (next + head) * V_SIZE;
        words(*k)[K_CELLS] = tiles[head].keys + p, (*v)[V_WIDTH] = tiles[head].values + p * LANES / PAIR;
        if (whole) {
            pack_keys(w->keys + (at + head) * K_SIZE, KV_HEADS * K_SIZE, next_k, *k);
            pack_values(w->values + (at + head) * V_SIZE, KV_HEADS * V_SIZE, next_v, v);
        } else {
            number keys[LANES * K_SIZE], values[LANES * V_SIZE];
            gather(w->keys, K_SIZE, t->row, t->head + head, from, seen, keys);
            gather(w->values, V_SIZE, t->row, t->head + head, from, seen, values);
            pack_keys(keys, K_SIZE, next_k, *k);
            pack_values(values, V_SIZE, next_v, v);
        }
    }
}

/* The sums of one span from nothing. */
static void add_span(const work *w, const task *t, int64_t span, scratch *s, state *sums) {
    const int queries = t->tokens * GROUP;
    const view seen = {largest(sight(w, t->row, t->token).begin, span * SPAN),
                       least(sight(w, t->row, t->token + t->tokens - 1).end, (span + 1) * SPAN)};
    for (int i = 0; i < queries * t->heads; i++) sums[i] = (state){.top = -FLT_MAX};
    for (int64_t start = seen.begin / KEYS * KEYS; start < seen.end; start += KEYS) {
        for (int64_t from = start; from < least(start + KEYS, seen.end); from += LANES)
            pack(w, t, from, seen, (from - start) / LANES, s->tiles);
        for (int64_t head = 0; head < t->heads; head++)
            absorb_tile(w, t, start, s, s->tiles + head, s->q[head * queries], sums + head * queries);
    }
}

/* Adds what was summed after it. */
static void merge(state *sum, const state *part) {
    const float top = fmaxf(sum->top, part->top);
    const float a = power((wide){0} + (sum->top - top))[0], b = power((wide){0} + (part->top - top))[0];
    sum->total = sum->total * a + part->total * b;
    for (int i = 0; i < V_WIDTH; i++) sum->mixed[i] = sum->mixed[i] * a + part->mixed[i] * b;
    sum->top = top;
}

/* Where a query of a task is: counted in tokens, and the head. */
static inline void locate(const task *t, int i, int64_t *token, int64_t *head) {
    const int queries = t->tokens * GROUP;
    *token = t->row->first + t->token + i % queries / GROUP;
    *head = (t->head + i / queries) * GROUP + i % GROUP;
}

static void finish(const work *w, const task *t, state *sums) {
    for (int i = 0; i < t->tokens * GROUP * t->heads; i++) {
        int64_t token, head;
        locate(t, i, &token, &head);
        if (w->sinks) {
            state sink = {.top = w->sinks[head] * LOG2_E, .total = {1}};
            merge(sums + i, &sink);
        }
        const float total = sum(sums[i].total), scale = total == 0 ? 0 : 1 / total;
        number *output = w->output + (token * KV_HEADS * GROUP + head) * V_SIZE;
        for (int c = 0; c < V_WIDTH; c++) store(output + c * LANES, sums[i].mixed[c] * scale);
    }
}

static void take_queries(const work *w, const task *t, scratch *s) {
    for (int i = 0; i < t->tokens * GROUP * t->heads; i++) {
        int64_t token, head;
        locate(t, i, &token, &head);
        const number *q = w->q + token * w->q_token + head * w->q_head;
        for (int c = 0; c < K_CELLS; c += LANES) {
            words x = cells(q + c * PAIR, K_SIZE - c * PAIR);
            memcpy(s->q[i] + c, &x, least(K_CELLS - c, LANES) * sizeof(cell));
        }
    }
}

/* The spans that a task sees. */
static inline view spans(const work *w, const row *r, int64_t token, int64_t tokens) {
    return (view){sight(w, r, token).begin / SPAN, (sight(w, r, token + tokens - 1).end + SPAN - 1) / SPAN};
}

static void run(const work *w, const task *t, scratch *s) {
    take_queries(w, t, s);
    if (t->states) {
        add_span(w, t, t->span, s, t->states);
        return;
    }
    view seen = spans(w, t->row, t->token, t->tokens);
    for (int64_t span = seen.begin; span < largest(seen.end, seen.begin + 1); span++) {
        add_span(w, t, span, s, span == seen.begin ? s->sums : s->parts);
        if (span != seen.begin)
            for (int i = 0; i < t->tokens * GROUP * t->heads; i++) merge(s->sums + i, s->parts + i);
    }
    finish(w, t, s->sums);
}

static double effort(const work *w, const row *r) {
    return (double)r->count * least(r->length, w->window + r->count);
}

/* The tasks of a row, none of which should take more than `share`; `states` is moved past those of its spans. With
   `tasks` none they are only counted. */
static int64_t divide(const work *w, const row *r, double share, task *tasks, state **states, int64_t *held) {
    const int64_t most = MOST / GROUP, blocks = largest((r->count + most - 1) / most, 1);
    const int64_t together = (r->count + blocks - 1) / blocks;
    const view all = spans(w, r, 0, r->count);
    const double part = effort(w, r) / blocks / KV_HEADS, piece = part / largest(all.end - all.begin, 1);
    int64_t heads = least(MOST / (GROUP * together), HEADS), number_of = 0;
    if (part * heads > share && piece * heads > share) heads = 1;
    const int split = part * heads > share && blocks == 1; /* more would take much memory */
    for (int64_t block = blocks - 1; block >= 0; block--) {
        const int64_t token = block * together, tokens = least(together, r->count - token);
        const view seen = spans(w, r, token, tokens);
        const int several = split && seen.end - seen.begin > 1;
        for (int64_t head = 0; head < KV_HEADS; head += heads)
            for (int64_t span = seen.begin; span < (several ? seen.end : seen.begin + 1); span++, number_of++) {
                const int64_t some = least(heads, KV_HEADS - head);
                if (tasks) {
                    tasks[number_of] = (task){r, token, tokens, head, some, span, several ? *states : NULL};
                    if (several) *states += tokens * GROUP * some;
                }
                if (several) *held += tokens * GROUP * some;
            }
    }
    return number_of;
}

/* The sums of all spans, if a task is the first of them. */
static void join(const work *w, const task *t, const task *end) {
    if (!t->states || t->span != spans(w, t->row, t->token, t->tokens).begin) return;
    for (const task *other = t + 1; other < end && other->row == t->row && other->span != t->span; other++)
        for (int i = 0; i < t->tokens * GROUP * t->heads; i++) merge(t->states + i, other->states + i);
    finish(w, t, t->states);
}

/* Writes keys and values of new tokens to their slots, which are counted in tokens; strides are those of k and v. */
void keep(const number *k, const number *v, number *keys, number *values, const int64_t *slots, int64_t tokens,
          int64_t k_token, int64_t k_head, int64_t v_token, int64_t v_head) {
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t head = 0; head < KV_HEADS; head++) {
            const int64_t to = slots[t] * KV_HEADS + head;
            memcpy(keys + to * K_SIZE, k + t * k_token + head * k_head, K_SIZE * sizeof *k);
            memcpy(values + to * V_SIZE, v + t * v_token + head * v_head, V_SIZE * sizeof *v);
        }
}

/* All rows; 0, or 1 where memory is lacking. */
int attention(const work *w) {
    double whole = 0;
    int64_t count = 0, held = 0;
    for (int64_t i = 0; i < w->count; i++) whole += effort(w, w->rows + i);
    const double share = whole / w->threads / 2;
    for (int64_t i = 0; i < w->count; i++) count += divide(w, w->rows + i, share, NULL, NULL, &held);
    task *tasks = malloc((count + 1) * sizeof *tasks);
    state *states = aligned_alloc(LINE, (held + 1) * sizeof *states), *next = states;
    if (!tasks || !states) {
        free(tasks);
        free(states);
        return 1;
    }
    held = count = 0;
    for (int64_t i = 0; i < w->count; i++) count += divide(w, w->rows + i, share, tasks + count, &next, &held);
#pragma omp parallel num_threads(w->threads)
    {
        scratch s;
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < count; i++) run(w, tasks + i, &s);
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < (held ? count : 0); i++) join(w, tasks + i, tasks + count);
    }
    free(tasks);
    free(states);
    return 0;
}
