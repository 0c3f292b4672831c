/* Decode attention over the paged KV cache on CPUs: one new token a row, no copy of what it sees.

   cpu_attention.py has this compiled when an engine starts, for the processor at hand and one shape: HALF says whether
   the numbers are bfloat16 or float32; K_SIZE and V_SIZE are the sizes of a key and of a value, multiples of LANES;
   GROUP query heads share each of KV_HEADS heads; BLOCK tokens make a block. Sums are in float32. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define LANES 16
#define AHEAD 12 /* tokens that are fetched before they are needed */
#define LINE 64  /* bytes */

typedef float wide __attribute__((vector_size(4 * LANES)));
typedef uint32_t words __attribute__((vector_size(4 * LANES)));
typedef uint16_t halves __attribute__((vector_size(2 * LANES)));

#if HALF
typedef uint16_t number;
#else
typedef float number;
#endif

typedef struct {
    const number *q, *keys, *values; /* [rows, heads, K_SIZE], [blocks, BLOCK, KV_HEADS, K_SIZE or V_SIZE] */
    number *output;                  /* [rows, heads, V_SIZE] */
    const int64_t *tables, *lengths; /* [rows, width], [rows] */
    const float *sinks;              /* [heads], or none */
    int64_t rows, width, window;     /* window: tokens that are seen */
    float scale, softcap;            /* softcap: 0 for none */
    int64_t threads;
} work;

static inline wide load(const number *from) {
#if HALF
    halves bits;
    memcpy(&bits, from, sizeof bits);
    return (wide)(__builtin_convertvector(bits, words) << 16);
#else
    wide numbers;
    memcpy(&numbers, from, sizeof numbers);
    return numbers;
#endif
}

static inline void store(number *to, wide numbers) {
#if HALF
    words bits = (words)numbers, nearest_even = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    words quiet = (bits >> 16) | 0x40, is_nan = (words)(numbers != numbers);
    halves rounded = __builtin_convertvector((nearest_even & ~is_nan) | (quiet & is_nan), halves);
    memcpy(to, &rounded, sizeof rounded);
#else
    memcpy(to, &numbers, sizeof numbers);
#endif
}

static inline float sum(wide x) {
    x += __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
    x += __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
    x += __builtin_shufflevector(x, x, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
    return x[0] + x[1];
}

/* e to numbers that are not positive; within 3e-7 of it, 0 for very small ones. */
static inline wide exponential(wide x) {
    wide y = x * 1.44269504f;
    words small = (words)(y < -126.0f);
    wide nearest = y + 12582912.0f; /* where the last place of a float is 1 */
    wide f = y - (nearest - 12582912.0f);
    wide power = 1.0f + f * (0.69314718f + f * (0.24022651f + f * (0.05550411f + f * (0.00961813f +
                 f * (0.00133336f + f * 0.00015404f)))));
    return (wide)(((words)power + ((words)nearest << 23)) & ~small);
}

static inline void fetch(const number *from, int64_t count) {
    for (int64_t byte = 0; byte < count * (int64_t)sizeof(number); byte += LINE)
        __builtin_prefetch((const char *)from + byte);
}

/* Where token `t` of a row is in the cache, counted in tokens. */
static inline int64_t place(const int64_t *table, int64_t t) {
    return table[t / BLOCK] * BLOCK + t % BLOCK;
}

/* From scores to weights: those of `count` tokens, filled up to whole vectors. */
static void weigh(float *scores, int64_t count, const float *sink) {
    float top = sink ? *sink : -INFINITY;
    for (int64_t t = 0; t < count; t++) top = scores[t] > top ? scores[t] : top;
    for (int64_t t = count; t % LANES; t++) scores[t] = -1e30f;
    wide total = {0};
    for (int64_t t = 0; t < count; t += LANES) {
        wide s;
        memcpy(&s, scores + t, sizeof s);
        s = exponential(s - top);
        total += s;
        memcpy(scores + t, &s, sizeof s);
    }
    float whole = sum(total) + (sink ? expf(*sink - top) : 0);
    for (int64_t t = 0; t < count; t++) scores[t] /= whole;
}

/* One row, for the KV heads from `first` to before `last`; `scores` has room for `most` tokens of each of its heads. */
static void attend(const work *w, int64_t row, int64_t first, int64_t last, float *scores, int64_t most) {
    const int64_t *table = w->tables + row * w->width, length = w->lengths[row];
    const int64_t begin = length > w->window ? length - w->window : 0;
    wide q[KV_HEADS][GROUP][K_SIZE / LANES], mixed[KV_HEADS][GROUP][V_SIZE / LANES];
    for (int64_t kv = first; kv < last; kv++)
        for (int g = 0; g < GROUP; g++) {
            const number *query = w->q + ((row * KV_HEADS + kv) * GROUP + g) * K_SIZE;
            for (int i = 0; i < K_SIZE / LANES; i++) q[kv][g][i] = load(query + i * LANES) * w->scale;
        }

    for (int64_t t = begin; t < length; t++) {
        if (t + AHEAD < length)
            fetch(w->keys + (place(table, t + AHEAD) * KV_HEADS + first) * K_SIZE, (last - first) * K_SIZE);
        const number *key = w->keys + place(table, t) * KV_HEADS * K_SIZE;
        for (int64_t kv = first; kv < last; kv++) {
            wide products[GROUP] = {{0}};
            for (int i = 0; i < K_SIZE / LANES; i++) {
                wide k = load(key + kv * K_SIZE + i * LANES);
                for (int g = 0; g < GROUP; g++) products[g] += q[kv][g][i] * k;
            }
            for (int g = 0; g < GROUP; g++) {
                float score = sum(products[g]);
                if (w->softcap != 0) score = w->softcap * tanhf(score / w->softcap);
                scores[((kv - first) * GROUP + g) * most + t - begin] = score;
            }
        }
    }

    for (int64_t head = first * GROUP; head < last * GROUP; head++)
        weigh(scores + (head - first * GROUP) * most, length - begin, w->sinks ? w->sinks + head : NULL);

    memset(mixed, 0, sizeof mixed);
    for (int64_t t = begin; t < length; t++) {
        if (t + AHEAD < length)
            fetch(w->values + (place(table, t + AHEAD) * KV_HEADS + first) * V_SIZE, (last - first) * V_SIZE);
        const number *value = w->values + place(table, t) * KV_HEADS * V_SIZE;
        for (int64_t kv = first; kv < last; kv++)
            for (int i = 0; i < V_SIZE / LANES; i++) {
                wide v = load(value + kv * V_SIZE + i * LANES);
                for (int g = 0; g < GROUP; g++)
                    mixed[kv][g][i] += scores[((kv - first) * GROUP + g) * most + t - begin] * v;
            }
    }

    for (int64_t kv = first; kv < last; kv++)
        for (int g = 0; g < GROUP; g++) {
            number *output = w->output + ((row * KV_HEADS + kv) * GROUP + g) * V_SIZE;
            for (int i = 0; i < V_SIZE / LANES; i++) store(output + i * LANES, mixed[kv][g][i]);
        }
}

/* All rows; 0, or 1 where memory is lacking. A few rows are cut by heads, so that no thread is idle. */
int decode_attention(const work *w) {
    const int64_t parts = w->rows < w->threads ? KV_HEADS : 1, heads = KV_HEADS / parts;
    const int64_t most = (w->width * BLOCK + LANES - 1) / LANES * LANES;
    int failed = 0;
#pragma omp parallel num_threads(w->threads)
    {
        float *scores = malloc(sizeof(float) * heads * GROUP * most);
        if (!scores) {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp for schedule(static)
        for (int64_t unit = 0; unit < w->rows * parts; unit++) {
            const int64_t first = unit % parts * heads;
            if (scores) attend(w, unit / parts, first, first + heads, scores, most);
        }
        free(scores);
    }
    return failed;
}
