/* Recurrent layers: causal convolutions, the gated delta rule and selective scans of a flat batch.

   A thread takes a part of a sequence's state and computes the tokens one after the other. All sums have a fixed order, so
   results do not depend on threads, on the rest of the batch or on how a prompt is cut into chunks. */

#include "activations.h"
#include "recurrent.h"

#define PARALLEL_ELEMENTS 8192 /* fewer are not worth waking the other threads */
#define CHANNELS 64            /* of a convolution, for one thread */
#define TOKENS_AHEAD 8         /* whose inputs are fetched */
#define MAX_TAPS 8             /* as in recurrent.py */
#define COLUMNS 32             /* of a state of the delta rule, which stay in the L1 cache */
#define COLUMN_VECS (COLUMNS / LANES)
#define ROWS 32 /* of a state of a selective scan, the same */

/* Whether the sequence of the token before it, if there is one, has ended. */
static inline int begins(const flat_batch *batch, int64_t token) {
    return !token || token == batch->tokens || batch->slots[token - 1].slot != batch->slots[token].slot;
}

/* `count` elements from [i, j, k] on in the last dimension; further lanes are 0, or repeat the element if its stride is 0. */
INLINE f32_vec load_last(const strided *x, int64_t i, int64_t j, int64_t k, int64_t count) {
    const int64_t stride = x->strides[2], at = i * x->strides[0] + j * x->strides[1] + k * stride;
    const scalar_t *from = (const scalar_t *)x->data + at;
    const float *from_f32 = (const float *)x->data + at;
    if (!stride) return broadcast(x->in_f32 ? *from_f32 : load_partial(from, 1)[0]);
    if (!x->in_f32) return load_strided(from, stride, count);
    if (stride == 1 && count >= LANES) return load_f32(from_f32);
    float elements[LANES] = {0};
    for (int64_t lane = 0; lane < min_i64(count, LANES); lane++) elements[lane] = from_f32[lane * stride];
    return load_f32(elements);
}

INLINE f32_vec load_floats(const float *from, int64_t count) {
    return load_last(&(strided){from, {0, 0, 1}, 1}, 0, 0, 0, count);
}

INLINE void store_floats(float *to, f32_vec x, int64_t count) {
    if (count >= LANES) store_f32(to, x);
    else memcpy(to, &x, count * sizeof *to);
}

/* Some channels: their last inputs, the newest one last, and the weight. */
typedef struct {
    int64_t first, count;
    scalar_t inputs[MAX_TAPS][CHANNELS];
    float weight[MAX_TAPS][CHANNELS];
} channel_block;

/* Reads all inputs but the oldest one from a slot, or writes them there. */
static void copy_tail(const conv_args *p, int64_t slot, int writes, channel_block *block) {
    const int64_t bytes = block->count * sizeof(scalar_t);
    scalar_t *tail = (scalar_t *)p->batch.states + slot * (p->taps - 1) * p->channels + block->first;
    for (int64_t tap = 1; tap < p->taps; tap++, tail += p->channels)
        if (writes) memcpy(tail, block->inputs[tap], bytes);
        else if (slot < 0) memset(block->inputs[tap], 0, bytes);
        else memcpy(block->inputs[tap], tail, bytes);
}

/* The outputs for a token. */
static void convolve_token(const conv_args *p, int64_t token, channel_block *block) {
    memmove(block->inputs[0], block->inputs[1], (p->taps - 1) * sizeof *block->inputs);
    for (int64_t i = 0; i < block->count; i += LANES) {
        const int64_t channel = block->first + i, count = block->count - i;
        __builtin_prefetch((const scalar_t *)p->x.data + (token + TOKENS_AHEAD) * p->x.strides[1] + channel * p->x.strides[2]);
        store_partial(block->inputs[p->taps - 1] + i, load_last(&p->x, 0, token, channel, count), count);
        f32_vec sum = {0};
        if (p->bias.data) sum = load_last(&p->bias, 0, 0, channel, count);
        for (int64_t tap = 0; tap < p->taps; tap++)
            sum = fma_vec(load(block->inputs[tap] + i), load_f32(block->weight[tap] + i), sum);
        if (p->activation >= 0) sum = activate(sum, p->activation);
        store_partial(p->batch.y + token * p->channels + channel, sum, count);
    }
}

/* y [tokens, channels]: a convolution of each channel with its last inputs, and an activation. */
void EXPORT(causal_conv)(const conv_args *p) {
    const flat_batch *batch = &p->batch;
#pragma omp parallel for num_threads(batch->threads) if (batch->tokens * p->channels >= PARALLEL_ELEMENTS)
    for (int64_t channel = 0; channel < p->channels; channel += CHANNELS) {
        channel_block block = {.first = channel, .count = min_i64(CHANNELS, p->channels - channel)};
        for (int64_t tap = 0; tap < p->taps; tap++)
            for (int64_t i = 0; i < block.count; i += LANES)
                store_f32(block.weight[tap] + i, load_last(&p->weight, 0, tap, channel + i, block.count - i));
        for (int64_t token = 0; token < batch->tokens; token++) {
            const token_slots *slots = batch->slots + token;
            if (begins(batch, token)) copy_tail(p, slots->source, 0, &block);
            convolve_token(p, token, &block);
            if (begins(batch, token + 1)) copy_tail(p, slots->slot, 1, &block);
            if (slots->save >= 0) copy_tail(p, slots->save, 1, &block);
        }
    }
}

/* Some columns or rows of a head's state, in the slot of a sequence, before a token. */
typedef struct {
    int64_t token, head, first, count;
    float *state;
} state_part;

/* Calls `step` for the tokens of each sequence in order. States are [slots, heads, size * length]; a part has up to `width`
   columns or rows of `length` elements. */
static void run_steps(
    const flat_batch *batch, int64_t heads, int64_t size, int64_t length, int64_t width,
    void (*step)(const void *args, const state_part *part), const void *args
) {
    const int64_t per_head = (size + width - 1) / width, parts = heads * per_head, slot_size = heads * size * length;
#pragma omp parallel for schedule(static, 1) num_threads(batch->threads) if (batch->tokens * slot_size >= PARALLEL_ELEMENTS)
    for (int64_t i = 0; i < batch->tokens * parts; i++) {
        const int64_t head = i % parts / per_head, first = i % per_head * width, count = min_i64(width, size - first);
        const token_slots *slots = batch->slots + i / parts;
        float *states = (float *)batch->states + (head * size + first) * length;
        state_part part = {i / parts, head, first, count, states + slots->slot * slot_size};
        const int64_t bytes = count * length * sizeof(float);
        if (!begins(batch, part.token)) continue;
        if (slots->source < 0) memset(part.state, 0, bytes);
        else if (slots->source != slots->slot) memcpy(part.state, states + slots->source * slot_size, bytes);
        do {
            step(args, &part);
            if (slots->save >= 0) memcpy(states + slots->save * slot_size, part.state, bytes);
            part.token++, slots++;
        } while (!begins(batch, part.token));
    }
}

static inline int64_t padded(int64_t size) { return (size + SUM_LANES - 1) / SUM_LANES * SUM_LANES; }

/* A row of the last dimension, filled up with zeros. */
static void load_row(const strided *x, int64_t i, int64_t j, int64_t size, float *to) {
    for (int64_t k = 0; k < padded(size); k += LANES) store_f32(to + k, load_last(x, i, j, k, max_i64(size - k, 0)));
}

static inline float dot(const float *a, const float *b, int64_t size) {
    f32_vec sums[SUM_VECS] = {{0}};
    for (int64_t i = 0; i < size; i += SUM_LANES)
        for (int vec = 0; vec < SUM_VECS; vec++)
            sums[vec] = fma_vec(load_f32(a + i + vec * LANES), load_f32(b + i + vec * LANES), sums[vec]);
    return reduce_sums(sums);
}

/* state = state * decay + key * delta, where delta = beta * (v - key . state * decay); y = query . state. Keys and queries
   are multiplied by their scales later. */
INLINE void update_columns(const int64_t width, const delta_args *p, const state_part *part, const float *q, const float *k) {
    const int64_t token = part->token, head = part->head;
    const float q_scale = 1 / sqrtf(p->key_size * (p->normalize ? dot(q, q, p->key_size) + 1e-6f : 1));
    const float k_scale = p->normalize ? 1 / sqrtf(dot(k, k, p->key_size) + 1e-6f) : 1;
    const f32_vec decay = exp_f32(broadcast(load_last(&p->decay, 0, token, head, 1)[0]));
    const f32_vec beta = broadcast(load_last(&p->beta, 0, token, head, 1)[0]);
    const f32_vec attention = broadcast(dot(q, k, p->key_size));
    scalar_t *y = p->batch.y + (token * p->heads + head) * p->size + part->first;
    f32_vec of_query[COLUMN_VECS] = {{0}}, delta[COLUMN_VECS] = {{0}};
    for (int64_t row = 0; row < p->key_size; row++)
        for (int64_t vec = 0, i = 0; vec < COLUMN_VECS && i < width; vec++, i += LANES) {
            const f32_vec state = load_floats(part->state + row * width + i, width - i);
            of_query[vec] = fma_vec(broadcast(q[row]), state, of_query[vec]);
            delta[vec] = fma_vec(broadcast(k[row]), state, delta[vec]);
        }
    for (int64_t vec = 0, i = 0; vec < COLUMN_VECS && i < width; vec++, i += LANES) {
        const f32_vec v = load_last(&p->v, token, head, part->first + i, width - i);
        delta[vec] = beta * k_scale * fma_vec(-decay * k_scale, delta[vec], v);
        store_partial(y + i, q_scale * fma_vec(attention, delta[vec], decay * of_query[vec]), width - i);
    }
    for (int64_t row = 0; row < p->key_size; row++)
        for (int64_t vec = 0, i = 0; vec < COLUMN_VECS && i < width; vec++, i += LANES) {
            float *state = part->state + row * width + i;
            const f32_vec kept = decay * load_floats(state, width - i);
            store_floats(state, fma_vec(broadcast(k[row]), delta[vec], kept), width - i);
        }
}

static void step_delta_rule(const void *args, const state_part *part) {
    const delta_args *p = args;
    const int64_t head = part->head * p->key_heads / p->heads, size = p->key_size;
    float q[padded(size)] ALIGNED, k[padded(size)] ALIGNED;
    load_row(&p->q, part->token, head, size, q);
    load_row(&p->k, part->token, head, size, k);
    if (part->count == COLUMNS) update_columns(COLUMNS, p, part, q, k);
    else update_columns(part->count, p, part, q, k);
}

/* y [tokens, heads, size]: linear attention whose state decays and forgets what a key had before. */
void EXPORT(gated_delta_rule)(const delta_args *p) {
    run_steps(&p->batch, p->heads, p->size, p->key_size, COLUMNS, step_delta_rule, p);
}

/* For some rows: dt * x, and the logarithm of the decay but for the factor a, to base 2; the decay if heads have one a. */
static void prepare_rows(const scan_args *p, const state_part *part, float *inputs, float *decays) {
    for (int64_t i = 0; i < part->count; i += LANES) {
        const int64_t token = part->token, head = part->head, row = part->first + i, count = part->count - i;
        f32_vec dt = load_last(&p->dt, token, head, row, count);
        if (p->dt_bias.data) dt += load_last(&p->dt_bias, token, head, row, count);
        dt = -max_vec(broadcast(-p->dt_max), -max_vec(broadcast(p->dt_min), softplus(dt)));
        store_f32(inputs + i, dt * load_last(&p->x, token, head, row, count));
        f32_vec decay = dt * LOG2_E;
        if (!p->a.strides[2]) decay = exp2_f32(decay * load_last(&p->a, head, row, 0, count));
        store_f32(decays + i, decay);
    }
}

/* SUM_LANES elements of a row, of which there are `count`: state = state * decay + input * b. Adds state * c to the sums. */
INLINE void update_lanes(
    const int64_t count, f32_vec decay, const float *a, f32_vec input, const float *b, const float *c, float *state,
    f32_vec sums[SUM_VECS]
) {
    for (int64_t vec = 0, i = 0; vec < SUM_VECS; vec++, i += LANES) {
        const int64_t left = max_i64(count - i, 0);
        const f32_vec factor = a ? exp2_f32(decay * load_floats(a + i, left)) : decay;
        const f32_vec updated = fma_vec(factor, load_floats(state + i, left), input * load_f32(b + i));
        sums[vec] = fma_vec(updated, load_f32(c + i), sums[vec]);
        store_floats(state + i, updated, left);
    }
}

/* One row; the sum of state * c. */
INLINE float update_row(
    const int a_varies, int64_t size, f32_vec decay, const float *a, f32_vec input, const float *b, const float *c, float *state
) {
    const int64_t whole = size / SUM_LANES * SUM_LANES;
    f32_vec sums[SUM_VECS] = {{0}};
    for (int64_t i = 0; i < whole; i += SUM_LANES)
        update_lanes(SUM_LANES, decay, a_varies ? a + i : NULL, input, b + i, c + i, state + i, sums);
    a = a_varies ? a + whole : NULL;
    if (whole < size) update_lanes(size - whole, decay, a, input, b + whole, c + whole, state + whole, sums);
    return reduce_sums(sums);
}

static void finish_rows(const scan_args *p, const state_part *part, const float *sums) {
    scalar_t *to = p->batch.y + (part->token * p->heads + part->head) * p->size + part->first;
    for (int64_t i = 0; i < part->count; i += LANES) {
        const int64_t token = part->token, head = part->head, row = part->first + i, count = part->count - i;
        f32_vec y = load_f32(sums + i);
        if (p->d.data) y = fma_vec(load_last(&p->d, token, head, row, count), load_last(&p->x, token, head, row, count), y);
        if (p->z.data) y *= silu(load_last(&p->z, token, head, row, count));
        store_partial(to + i, y, count);
    }
}

static void step_scan(const void *args, const state_part *part) {
    const scan_args *p = args;
    const int64_t group = part->head * p->groups / p->heads, size = p->state_size;
    const float *a = (const float *)p->a.data + part->head * p->a.strides[0] + part->first * p->a.strides[1];
    float b[padded(size)] ALIGNED, c[padded(size)] ALIGNED, inputs[ROWS], decays[ROWS], sums[ROWS];
    load_row(&p->b, part->token, group, size, b);
    load_row(&p->c, part->token, group, size, c);
    prepare_rows(p, part, inputs, decays);
    for (int64_t row = 0; row < part->count; row++) {
        const f32_vec decay = broadcast(decays[row]), input = broadcast(inputs[row]);
        float *state = part->state + row * size;
        if (!p->a.strides[2]) sums[row] = update_row(0, size, decay, NULL, input, b, c, state);
        else sums[row] = update_row(1, size, decay, a + row * p->a.strides[1], input, b, c, state);
    }
    finish_rows(p, part, sums);
}

/* y [tokens, heads, size]: the state spaces of Mamba 2, and of Mamba with one head. */
void EXPORT(selective_scan)(const scan_args *p) {
    run_steps(&p->batch, p->heads, p->size, p->state_size, ROWS, step_scan, p);
}
