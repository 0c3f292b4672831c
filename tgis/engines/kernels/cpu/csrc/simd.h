/* Vectors of LANES floats, as many as a register of the CPU holds, loaded from and stored to arrays of scalar_t:
   bfloat16 if BF16, else float32. */

#ifndef SIMD_H
#define SIMD_H

#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__SSE2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
#define LANES 16
#define LANE_INDEX {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}
#elif defined(__AVX2__)
#define LANES 8
#define LANE_INDEX {0, 1, 2, 3, 4, 5, 6, 7}
#else
#define LANES 4
#define LANE_INDEX {0, 1, 2, 3}
#endif

/* Sums over many elements have SUM_LANES lanes in SUM_VECS vectors: they are added in the same order on every CPU. */
#define SUM_LANES 16
#define SUM_VECS (SUM_LANES / LANES)

typedef float f32_vec __attribute__((vector_size(4 * LANES)));
typedef int32_t i32_vec __attribute__((vector_size(4 * LANES)));
typedef uint32_t u32_vec __attribute__((vector_size(4 * LANES)));
typedef uint16_t u16_vec __attribute__((vector_size(2 * LANES)));

#if BF16
typedef uint16_t scalar_t;
#define EXPORT(name) name##_bf16
#else
typedef float scalar_t;
#define EXPORT(name) name##_f32
#endif

#define CACHE_LINE 64 /* bytes */
#define ALIGNED __attribute__((aligned(CACHE_LINE)))
#define LOG2_E 1.44269504f
#define INLINE static inline __attribute__((always_inline))

static inline int64_t min_i64(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t max_i64(int64_t a, int64_t b) { return a > b ? a : b; }
static inline float max_f32(float a, float b) { return a > b ? a : b; }

static inline f32_vec load_f32(const float *from) {
    f32_vec x;
    memcpy(&x, from, sizeof x);
    return x;
}

static inline void store_f32(float *to, f32_vec x) { memcpy(to, &x, sizeof x); }

static inline f32_vec broadcast(float x) { return x - (f32_vec){0}; } /* + would make 0 of -0, which takes an instruction */

/* a * b + c, rounded once. */
static inline f32_vec fma_vec(f32_vec a, f32_vec b, f32_vec c) {
#if defined(__AVX512F__)
    return (f32_vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (f32_vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (f32_vec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    f32_vec sum = {0};
    for (int lane = 0; lane < LANES; lane++) sum[lane] = fmaf(a[lane], b[lane], c[lane]);
    return sum;
#endif
}

static inline u32_vec load_u32(const void *from) {
    u32_vec x;
    memcpy(&x, from, sizeof x);
    return x;
}

static inline f32_vec load_bf16(const uint16_t *from) {
    u16_vec bits;
    memcpy(&bits, from, sizeof bits);
#if defined(__AVX512F__)
    return (f32_vec)((u32_vec)_mm512_cvtepu16_epi32((__m256i)bits) << 16); /* GCC converts a vector in two halves */
#else
    return (f32_vec)(__builtin_convertvector(bits, u32_vec) << 16);
#endif
}

static inline f32_vec load(const scalar_t *from) {
#if BF16
    return load_bf16(from);
#else
    return load_f32(from);
#endif
}

/* Round to the nearest bfloat16, ties to even; NaN stays NaN. */
static inline u16_vec to_bf16(f32_vec x) {
#if defined(__AVX512BF16__)
    return (u16_vec)_mm512_cvtneps_pbh((__m512)x);
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
    return (u16_vec)vcvt_bf16_f32((float32x4_t)x);
#else
    u32_vec bits = (u32_vec)x, rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    u32_vec quiet_nan = (bits >> 16) | 0x40, is_nan = (u32_vec)(x != x);
    return __builtin_convertvector((rounded & ~is_nan) | (quiet_nan & is_nan), u16_vec);
#endif
}

static inline void store(scalar_t *to, f32_vec x) {
#if BF16
    u16_vec bits = to_bf16(x);
    memcpy(to, &bits, sizeof bits);
#else
    store_f32(to, x);
#endif
}

/* The first `count` lanes; the others are 0. */
static inline f32_vec load_partial(const scalar_t *from, int64_t count) {
    if (count >= LANES) return load(from);
    scalar_t padded[LANES] = {0};
    memcpy(padded, from, count * sizeof *padded);
    return load(padded);
}

/* The same of elements that are `stride` apart. */
static inline f32_vec load_strided(const scalar_t *from, int64_t stride, int64_t count) {
    if (stride == 1) return load_partial(from, count);
    scalar_t elements[LANES] = {0};
    for (int64_t i = 0; i < min_i64(count, LANES); i++) elements[i] = from[i * stride];
    return load(elements);
}

static inline void store_partial(scalar_t *to, f32_vec x, int64_t count) {
    if (count >= LANES) return store(to, x);
    scalar_t all[LANES];
    store(all, x);
    memcpy(to, all, count * sizeof *all);
}

/* Element-wise maximum; b where either is NaN. */
static inline f32_vec max_vec(f32_vec a, f32_vec b) {
#if defined(__AVX512F__)
    return (f32_vec)_mm512_max_ps((__m512)a, (__m512)b);
#else
    u32_vec a_wins = (u32_vec)(a > b);
    return (f32_vec)((a_wins & (u32_vec)a) | (~a_wins & (u32_vec)b));
#endif
}

static inline u32_vec max_u32(u32_vec a, u32_vec b) {
#if defined(__AVX512F__)
    return (u32_vec)_mm512_max_epu32((__m512i)a, (__m512i)b);
#else
    const u32_vec larger = (u32_vec)(a > b);
    return (larger & a) | (~larger & b);
#endif
}

/* Adds the halves of all lanes, then the halves of that. */
static inline float reduce_sums(f32_vec sums[SUM_VECS]) {
    for (int n = SUM_VECS / 2; n; n /= 2)
        for (int i = 0; i < n; i++) sums[i] += sums[i + n];
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)sums[0]);
#else
    f32_vec x = sums[0];
    for (int n = LANES / 2; n; n /= 2)
        for (int i = 0; i < n; i++) x[i] += x[i + n];
    return x[0];
#endif
}

static inline float reduce_max(f32_vec x) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)x);
#else
    for (int n = LANES / 2; n; n /= 2)
        for (int i = 0; i < n; i++) x[i] = max_f32(x[i], x[i + n]);
    return x[0];
#endif
}

static inline int any_lane(u32_vec mask) {
#if defined(__AVX512F__)
    return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#else
    uint32_t any = 0;
    for (int lane = 0; lane < LANES; lane++) any |= mask[lane];
    return any != 0;
#endif
}

/* 2^round(x) for x <= 126, and in `rest` what the rounding leaves; 0 where the power would be denormal. */
static inline f32_vec round_exp2(f32_vec x, f32_vec *rest) {
    x = max_vec((f32_vec){0} - 127.0f, x);
    const f32_vec rounded = x + 12583039.0f; /* 1.5 * 2^23 + 127: the integer part, as an exponent, moves to the lowest bits */
    *rest = x - (rounded - 12583039.0f);
    return (f32_vec)((u32_vec)rounded << 23);
}

/* 2^x, here and below for x <= 126, with a relative error below 3e-7; 0 where it would be denormal. */
static inline f32_vec exp2_f32(f32_vec x) {
    f32_vec f;
    const f32_vec power = round_exp2(x, &f);
    return power * (1.0f + f * (0.693146978f + f * (0.240222421f + f * (0.0555073374f + f * (0.00967151264f + f * 0.00132647271f)))));
}

/* The same as exact as scalar_t is: in bfloat16 with a relative error of 1e-4. */
static inline f32_vec exp2_scalar(f32_vec x) {
#if BF16
    f32_vec f;
    const f32_vec power = round_exp2(x, &f);
    return power * (1.0f + f * (0.693282927f + f * (0.242210959f + f * 0.0550089305f)));
#else
    return exp2_f32(x);
#endif
}

static inline f32_vec tanh_f32(f32_vec x) {
    u32_vec sign = (u32_vec)x & 0x80000000;
    f32_vec e = exp2_f32((f32_vec)((u32_vec)x ^ sign) * -2.88539008f); /* e^(-2|x|) */
    return (f32_vec)((u32_vec)((1.0f - e) / (1.0f + e)) | sign);
}

#endif
