/* Writes new keys and values to the KV cache, as they are or as int8 codes. */

#include "attention_tile.h"

#define PARALLEL_TOKENS 8 /* fewer new tokens are not worth waking the other threads */
#define LARGEST 127.0f    /* of the codes */
#define TINY 1e-30f       /* smaller values are 0 */

/* The codes of the values of a token and head, which are divided by `divisors` unless these are NULL. Returns the scale;
   it is not finite if one of the values is not. */
static float quantize(const scalar_t *from, int64_t size, const float *divisors, uint8_t *to) {
    float values[size];
    uint32_t wide[size];
    u32_vec largest = {0}; /* the bits of absolute values are in the order of these, NaN last */
    for (int64_t i = 0; i < size; i += LANES) {
        const f32_vec x = divisors ? load(from + i) / load_f32(divisors + i) : load(from + i);
        largest = max_u32(largest, (u32_vec)x & 0x7fffffff);
        store_f32(values + i, x);
    }
    for (int lane = 1; lane < LANES; lane++) largest[0] = largest[lane] > largest[0] ? largest[lane] : largest[0];
    const float top = ((f32_vec)largest)[0], factor = top < TINY ? 0 : LARGEST / top;
    for (int64_t i = 0; i < size; i += LANES) {
        /* 1.5 * 2^23: the rounded value moves to the lowest bits */
        const u32_vec code = (u32_vec)(load_f32(values + i) * factor + 12582912.0f);
        memcpy(wide + i, &code, sizeof code);
    }
    for (int64_t i = 0; i < size; i++) to[i] = wide[i];
    return top < TINY ? 0 : top / LARGEST;
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

/* Writes values of some bytes, as many side by side as `pair` says, to their places in the panels of token `at`; fetches
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
