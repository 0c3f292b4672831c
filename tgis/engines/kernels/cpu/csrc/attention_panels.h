/* The panels that a task reads: in the cache, or copied and widened for the products. */

#ifndef ATTENTION_PANELS_H
#define ATTENTION_PANELS_H

#include "attention_args.h"
#include "attention_tile.h"

/* Memory for panels that are not read where they are. */
typedef struct {
    scalar_t *keys, *values; /* a widened tile; without codes two panels of values that are partly unseen */
    float *scales;           /* of keys and of values, [2, TILE] */
} panel_copies;

/* Copies the values of a panel; zeros for those outside of [begin, end). */
static inline void copy_seen(const scalar_t *values, int64_t v_size, int64_t begin, int64_t end, scalar_t *to) {
    const uint32_t one = PAIR == 2 ? 0xffff : 0xffffffff;
    for (int64_t token = 0; token < PANEL; token += PAIR) {
        uint32_t seen = 0;
        for (int i = 0; i < PAIR; i++)
            if (token + i >= begin && token + i < end) seen |= one << (16 * i);
        for (int64_t i = 0; i < v_size; i += LANES) {
            const u32_vec part = load_u32(values + token * v_size + i * PAIR) & seen;
            memcpy(to + token * v_size + i * PAIR, &part, sizeof part);
        }
    }
}

/* The keys or values of a panel, codes [quads, width, QUAD], in the order of attention_tile.h, and the scales of its
   tokens; fetches a panel that is needed later. */
static void widen_panel(
    const char *panel, int64_t quads, int64_t width, const char *later, scalar_t *to, float *scales
) {
    for (int64_t quad = 0; quad < quads; quad++)
        for (int64_t first = 0; first < width; first += LANES) {
            const u32_vec four = load_u32(panel + (quad * width + first) * QUAD);
            u32_vec wide[QUAD];
            __builtin_prefetch(later + (quad * width + first) * QUAD);
#pragma GCC unroll 4
            for (int i = 0; i < QUAD; i++)
                wide[i] = (u32_vec)__builtin_convertvector((i32_vec)(four << (24 - 8 * i)) >> 24, f32_vec);
#pragma GCC unroll 4
            for (int i = 0; i < QUAD; i += PAIR) {
                u32_vec stored = wide[i];
#if BF16
                stored = stored >> 16 | (wide[i + 1] & 0xffff0000);
#endif
                memcpy(to + ((quad * QUAD + i) / PAIR * width + first) * PAIR, &stored, sizeof stored);
            }
        }
    memcpy(scales, panel + quads * width * QUAD, PANEL * SCALE_BYTES);
}

/* The panel that is widened a tile after that of a token: of the next head or, after the last one, of later tokens. */
static int64_t later_slot(const attention_args *args, const task *t, int64_t kv_head, int64_t token) {
    const int is_last = kv_head + 1 == t->kv_head + t->kv_heads;
    const int64_t next = is_last ? min_i64(token + TILE, t->seq->seq_len - 1) : token, size = args->block_size;
    const int64_t block = t->seq->block_table[next / size];
    return panel_slot(args->kv_heads, size, block, is_last ? t->kv_head : kv_head + 1, next % size);
}

/* Widens a panel of codes of keys and of values, and adds them to a tile. */
static void add_widened(
    const attention_args *args, const task *t, int64_t kv_head, int64_t token, int64_t slot, range seen, panels *tile,
    panel_copies *copies
) {
    const int64_t at = tile->count * PANEL, k_size = args->k_size, v_size = args->v_size;
    const int64_t later = later_slot(args, t, kv_head, token);
    const char *keys = panel_of(args->k_cache, args->is_coded, k_size, slot);
    const char *values = panel_of(args->v_cache, args->is_coded, v_size, slot);
    tile->keys[tile->count] = copies->keys + at * k_size;
    tile->values[tile->count] = copies->values + at * v_size;
    const char *later_keys = panel_of(args->k_cache, args->is_coded, k_size, later);
    const char *later_values = panel_of(args->v_cache, args->is_coded, v_size, later);
    widen_panel(keys, k_size / QUAD, PANEL, later_keys, copies->keys + at * k_size, copies->scales + at);
    widen_panel(values, PANEL / QUAD, v_size, later_values, copies->values + at * v_size, copies->scales + TILE + at);
    for (int64_t i = 0; i < PANEL; i++)
        if (token + i < seen.begin || token + i >= seen.end) copies->scales[TILE + at + i] = 0; /* NaN times 0 is NaN */
    tile->key_scales = copies->scales;
    tile->value_scales = copies->scales + TILE;
}

/* The panels of one KV head from `begin` on, up to the end of its tile or of what is seen. */
static panels find_panels(
    const attention_args *args, const task *t, int64_t kv_head, int64_t begin, range seen, panel_copies *copies
) {
    const int has_next = !args->is_coded && kv_head + 1 < t->kv_head + t->kv_heads;
    panels tile = {.next_keys = has_next ? args->block_size * args->k_size : 0};
    const int64_t end = min_i64(begin / TILE * TILE + TILE, seen.end);
    for (int64_t token = begin; token < end; token += PANEL, tile.count++) {
        const uint32_t size = args->block_size, block = (uint32_t)token / size, in_block = (uint32_t)token % size;
        const int64_t slot = panel_slot(args->kv_heads, size, t->seq->block_table[block], kv_head, in_block);
        if (args->is_coded) {
            add_widened(args, t, kv_head, token, slot, seen, &tile, copies);
            continue;
        }
        const scalar_t *values = (const scalar_t *)args->v_cache + slot * args->v_size;
        if (token < seen.begin || token + PANEL > seen.end) {
            scalar_t *copy = copies->values + (token < seen.begin ? 0 : PANEL * args->v_size);
            copy_seen(values, args->v_size, seen.begin - token, seen.end - token, copy);
            values = copy;
        }
        tile.keys[tile.count] = (const scalar_t *)args->k_cache + slot * args->k_size;
        tile.values[tile.count] = values;
    }
    return tile;
}

#endif
