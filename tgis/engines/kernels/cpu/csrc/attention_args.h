/* The arguments of attention, and which tokens each query sees. */

#ifndef ATTENTION_ARGS_H
#define ATTENTION_ARGS_H

#include "simd.h"

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
    int64_t is_coded;                    /* whether the cache has codes: see attention_tile.h */
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
    f32_vec *states; /* of a split; NULL for the whole context */
} task;

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

#endif
