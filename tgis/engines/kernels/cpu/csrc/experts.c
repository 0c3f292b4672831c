/* Mixtures of experts: for each token the sum of its experts' outputs times their weights, in the order of the top-k.

   Rows are sorted by expert, so that each weight is read once, and multiplied as in a plain layer: what a token gets does
   not depend on the others. */

#include "activations.h"
#include "experts.h"

typedef struct {
    expert_layer up, down; /* up: of the gate, too, if there is one: both parts are filled up to TILE_N outputs */
    int64_t num_experts, size, is_gated, activation; /* inputs of `down`; the activation as in activations.py */
    float alpha, limit, up_offset; /* activation(alpha * gate) / alpha * (up + up_offset), both limited */
} experts_params;

typedef struct {
    expert_block *blocks;
    int64_t num_blocks, num_rows;
    int64_t *places;  /* of each of tokens * top_k: its row */
    int64_t *sources; /* of each row: which of tokens * top_k is there; -1: none */
} expert_routes;

/* Sorts rows by expert, with room for a number of each expert in `counts`. Returns whether all experts exist. */
static int sort_rows(const int64_t *ids, int64_t count, int64_t num_experts, int64_t *counts, expert_routes *to) {
    memset(counts, 0, num_experts * sizeof *counts);
    for (int64_t i = 0; i < count; i++) {
        if (ids[i] < 0 || ids[i] >= num_experts) return 0;
        counts[ids[i]]++;
    }
    int64_t row = 0;
    for (int64_t expert = 0; expert < num_experts; expert++) {
        const int64_t last = row + counts[expert], begin = to->num_blocks;
        const int64_t blocks = (counts[expert] + EXPERT_ROWS - 1) / EXPERT_ROWS;
        counts[expert] = row; /* the next place of the expert from here on */
        for (int64_t first = row; first < last; first += EXPERT_ROWS)
            to->blocks[to->num_blocks++] = (expert_block){expert, first, min_i64(first + EXPERT_ROWS, last), begin, blocks};
        for (; row % EXPERT_ALIGNMENT || row < last; row++) to->sources[row] = -1;
    }
    for (int64_t i = 0; i < count; i++) to->sources[to->places[i] = counts[ids[i]]++] = i;
    to->num_rows = row;
    return 1;
}

/* The outputs of all rows, by all threads of a region. Units of one tile of a weight are neighbours, and so are the tiles
   of an expert. */
static void multiply_rows(const expert_layer *layer, const expert_routes *routes) {
    const int64_t tiles = layer->n / TILE_N;
    if (layer->quantize) {
#pragma omp for schedule(static)
        for (int64_t row = 0; row < routes->num_rows; row++)
            if (routes->sources[row] >= 0) layer->quantize(layer, row);
    }
#pragma omp for schedule(static)
    for (int64_t unit = 0; unit < routes->num_blocks * tiles; unit++) {
        const expert_block *first = routes->blocks + routes->blocks[unit / tiles].begin;
        const int64_t at = unit - first->begin * tiles;
        layer->multiply(layer, first + at % first->count, at / first->count);
    }
}

/* y [size] = activation of the outputs of `up` for one row; without a gate it is of `up` itself. */
static void activate_row(const experts_params *p, const scalar_t *x, scalar_t *y) {
    const scalar_t *up = x + p->up.n / 2;
    const f32_vec alpha = broadcast(p->alpha), limit = broadcast(p->limit);
    for (int64_t i = 0; i < p->size; i += LANES) {
        const f32_vec gate = -max_vec(-limit, -load_partial(x + i, p->size - i));
        f32_vec product = activate(alpha * gate, p->activation) / alpha;
        if (p->is_gated) {
            const f32_vec limited = -max_vec(-limit, -max_vec(-limit, load_partial(up + i, p->size - i)));
            product *= limited + p->up_offset;
        }
        store_partial(y + i, product, p->size - i);
    }
}

/* y [k of up] of a token: the sum of the rows in these places times their weights. */
static void combine_rows(
    const experts_params *p, const scalar_t *rows, const int64_t *places, const float *weights, int64_t top_k, scalar_t *y
) {
    for (int64_t i = 0; i < p->up.k; i += LANES) {
        f32_vec sum = {0};
        for (int64_t j = 0; j < top_k; j++)
            sum += weights[j] * load_partial(rows + places[j] * p->down.n + i, p->up.k - i);
        store_partial(y + i, sum, p->up.k - i);
    }
}

/* y [tokens, k of up] of x of the same shape, the numbers and weights of experts [tokens, top_k]. Memory as experts.py
   gives: inputs and outputs of layers, codes of inputs and the routes. Returns 0, or 1 if there is no such expert. */
int EXPORT(experts)(
    const experts_params *p, const scalar_t *x, const int64_t *ids, const float *weights, scalar_t *y, scalar_t *inputs,
    scalar_t *outputs, char *codes, int64_t *plan, int64_t tokens, int64_t top_k, int64_t threads
) {
    const int64_t count = tokens * top_k, k = p->up.k;
    expert_block *blocks = (expert_block *)plan;
    int64_t *places = (int64_t *)(blocks + count), *counts = places + count, *sources = counts + p->num_experts;
    expert_routes routes = {.blocks = blocks, .places = places, .sources = sources};
    if (!sort_rows(ids, count, p->num_experts, counts, &routes)) return 1;
    expert_layer up = p->up, down = p->down;
    up.x = down.x = inputs, up.y = down.y = outputs, up.codes = down.codes = codes;
    up.num_rows = down.num_rows = routes.num_rows;
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(static)
        for (int64_t row = 0; row < routes.num_rows; row++)
            if (sources[row] >= 0) memcpy(inputs + row * k, x + sources[row] / top_k * k, k * sizeof *x);
        multiply_rows(&up, &routes);
#pragma omp for schedule(static)
        for (int64_t row = 0; row < routes.num_rows; row++)
            if (sources[row] >= 0) activate_row(p, outputs + row * up.n, inputs + row * p->size);
        multiply_rows(&down, &routes);
#pragma omp for schedule(static)
        for (int64_t token = 0; token < tokens; token++)
            combine_rows(p, outputs, places + token * top_k, weights + token * top_k, top_k, y + token * k);
    }
    return 0;
}
