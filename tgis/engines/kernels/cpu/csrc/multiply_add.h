/* The multiply-add that GEMMs and attention are made of. Both pack what they read from memory in the same way: PAIR
   elements that are multiplied and added together are side by side. */

#ifndef MULTIPLY_ADD_H
#define MULTIPLY_ADD_H

#include "simd.h"

#define PAIR (BF16 ? 2 : 1)

/* What packed elements are multiplied by; bfloat16 is widened beforehand where the CPU does not multiply it. */
#if BF16 && !defined(__AVX512BF16__)
#define WIDENS 1
typedef float operand_t;
#else
#define WIDENS 0
typedef scalar_t operand_t;
#endif

/* sums += x (PAIR elements, the same for all lanes) * packed (PAIR elements for each lane), the second product first */
INLINE f32_vec multiply_add(
    f32_vec sums, const operand_t *x, const scalar_t *packed
) {
#if BF16 && defined(__AVX512BF16__)
    int32_t pair;
    memcpy(&pair, x, sizeof pair);
    return (f32_vec)_mm512_dpbf16_ps((__m512)sums, (__m512bh)_mm512_set1_epi32(pair), (__m512bh)_mm512_loadu_si512(packed));
#elif BF16
    u32_vec pairs;
    memcpy(&pairs, packed, sizeof pairs);
    sums += x[1] * (f32_vec)(pairs & 0xffff0000);
    return sums + x[0] * (f32_vec)(pairs << 16);
#else
    return sums + *x * load(packed);
#endif
}

static inline void store_operands(operand_t *to, f32_vec x) {
#if WIDENS
    memcpy(to, &x, sizeof x);
#else
    store(to, x);
#endif
}

#endif
