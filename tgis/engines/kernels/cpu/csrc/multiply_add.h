/* The multiply-add that GEMMs and attention are made of. Both pack what they read from memory in the same way: PAIR
   elements that are multiplied and added together are side by side. */

#ifndef MULTIPLY_ADD_H
#define MULTIPLY_ADD_H

#include "simd.h"

#if BF16 || defined(BY_BF16)
#define PAIR 2
#else
#define PAIR 1
#endif

/* A pair of bfloat16 beside float32 is multiplied in two turns, for all rows each: widened, both need too many registers. */
#if defined(BY_BF16)
#define TURNS 2
#else
#define TURNS 1
#endif

/* Packed elements have the type of x, or beside float32 one of 16 bits. */
#if defined(BY_BF16) || defined(BY_F16)
typedef uint16_t packed_t;
#else
typedef scalar_t packed_t;
#endif

/* What packed elements are multiplied by; bfloat16 is widened beforehand where the CPU does not multiply it. */
#if BF16 && !defined(__AVX512BF16__) && !defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define WIDENS 1
typedef float operand_t;
#else
#define WIDENS 0
typedef scalar_t operand_t;
#endif

#if defined(BY_F16)
static inline f32_vec from_f16(u16_vec bits) {
#if defined(__AVX512F__)
    return (f32_vec)_mm512_cvtph_ps((__m256i)bits);
#elif defined(__F16C__)
    return (f32_vec)_mm256_cvtph_ps((__m128i)bits);
#elif defined(__aarch64__)
    return (f32_vec)vcvt_f32_f16((float16x4_t)bits);
#else
    const u32_vec wide = __builtin_convertvector(bits, u32_vec); /* exponents get a bias of 127 in place of 15 */
    return (f32_vec)((u32_vec)((f32_vec)((wide & 0x7fff) << 13) * 0x1p112f) | (wide & 0x8000) << 16);
#endif
}
#endif

/* A packed element as scalar_t. */
static inline scalar_t unpack(packed_t x) {
#if defined(BY_BF16)
    return ((f32_vec)((u32_vec){x} << 16))[0];
#elif defined(BY_F16)
    return from_f16((u16_vec){x})[0];
#else
    return x;
#endif
}

/* sums += x (PAIR elements, the same for all lanes) * packed (PAIR elements for each lane), of bfloat16 the second product
   first, as the CPU adds them; or one of the TURNS of this. */
INLINE f32_vec multiply_add(
    f32_vec sums, const operand_t *x, const packed_t *packed, const int turn
) {
#if BF16 && defined(__AVX512BF16__)
    int32_t pair;
    memcpy(&pair, x, sizeof pair);
    return (f32_vec)_mm512_dpbf16_ps((__m512)sums, (__m512bh)_mm512_set1_epi32(pair), (__m512bh)_mm512_loadu_si512(packed));
#elif BF16 && !WIDENS
    uint32_t pair;
    memcpy(&pair, x, sizeof pair);
    const bfloat16x4_t both = vreinterpret_bf16_u32(vdup_n_u32(pair));
    const bfloat16x8_t pairs = vreinterpretq_bf16_u16(vld1q_u16(packed));
    /* Fused multiply-adds; bfdot rounds the sum of two products in another way. */
    return (f32_vec)vbfmlalbq_lane_f32(vbfmlaltq_lane_f32((float32x4_t)sums, pairs, both, 1), pairs, both, 0);
#elif PAIR == 2
    const u32_vec pairs = load_u32(packed);
    if (TURNS == 2) return sums + x[turn] * (f32_vec)(turn ? pairs & 0xffff0000 : pairs << 16);
    sums += x[1] * (f32_vec)(pairs & 0xffff0000);
    return sums + x[0] * (f32_vec)(pairs << 16);
#elif defined(BY_F16)
    u16_vec bits;
    memcpy(&bits, packed, sizeof bits);
    return sums + *x * from_f16(bits);
#else
    return sums + *x * load(packed);
#endif
}

static inline void store_operands(operand_t *to, f32_vec x) {
#if WIDENS
    store_f32(to, x);
#else
    store(to, x);
#endif
}

#endif
