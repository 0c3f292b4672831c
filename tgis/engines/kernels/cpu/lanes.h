/* Vectors of LANES floats, from and to rows of numbers: bfloat16 if HALF, else float32. */

#ifndef LANES
#define LANES 16

#include <stdint.h>
#include <string.h>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

typedef float wide __attribute__((vector_size(4 * LANES)));
typedef uint32_t words __attribute__((vector_size(4 * LANES)));
typedef uint16_t halves __attribute__((vector_size(2 * LANES)));

#if HALF
typedef uint16_t number;
#else
typedef float number;
#endif

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

/* To bfloat16: the nearest, or even. */
static inline halves rounded(wide numbers) {
#if defined(__AVX512BF16__)
    return (halves)_mm512_cvtneps_pbh((__m512)numbers);
#else
    words bits = (words)numbers, nearest = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    words quiet = (bits >> 16) | 0x40, is_nan = (words)(numbers != numbers);
    return __builtin_convertvector((nearest & ~is_nan) | (quiet & is_nan), halves);
#endif
}

static inline void store(number *to, wide numbers) {
#if HALF
    halves bits = rounded(numbers);
    memcpy(to, &bits, sizeof bits);
#else
    memcpy(to, &numbers, sizeof numbers);
#endif
}

/* The first `count` of them; the others are 0. */
static inline wide load_some(const number *from, int64_t count) {
    if (count >= LANES) return load(from);
    number some[LANES] = {0};
    memcpy(some, from, count * sizeof *some);
    return load(some);
}

static inline void store_some(number *to, wide numbers, int64_t count) {
    if (count >= LANES) return store(to, numbers);
    number some[LANES];
    store(some, numbers);
    memcpy(to, some, count * sizeof *some);
}

static inline float sum(wide x) {
    x += __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
    x += __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
    x += __builtin_shufflevector(x, x, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
    return x[0] + x[1];
}

#endif
