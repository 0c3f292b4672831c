/* Activations of vectors of floats. */

#ifndef ACTIVATIONS_H
#define ACTIVATIONS_H

#include "simd.h"

static inline f32_vec silu(f32_vec x) {
    x = max_vec((f32_vec){0} - 87.0f, x); /* e^87 is below 2^126; the result is 0 but for rounding anyway */
    return x / (1.0f + exp2_scalar(x * -LOG2_E));
}

static inline f32_vec sigmoid(f32_vec x) {
    return 1.0f / (1.0f + exp2_scalar(max_vec((f32_vec){0} - 87.0f, x) * -1.44269504f));
}

static inline f32_vec gelu_tanh(f32_vec x) {
    return 0.5f * x * (1.0f + tanh_f32(0.79788456f * (x + 0.044715f * x * x * x)));
}

/* erfc(x) for x >= 0, with a relative error below 3e-7: a polynomial in 1 / (1 + x / 2) for its logarithm. */
static inline f32_vec erfc_nonnegative(f32_vec x) {
    static const float factors[] = {-0.82215223f, 1.48851587f, -1.13520398f, 0.27886807f, -0.18628806f,
                                    0.09678418f,  0.37409196f, 1.00002368f,  -1.26551223f};
    const f32_vec t = 1.0f / (1.0f + 0.5f * x);
    f32_vec sum = (f32_vec){0} + 0.17087277f;
    for (int i = 0; i < 9; i++) sum = sum * t + factors[i];
    return t * exp2_f32((sum - x * x) * LOG2_E);
}

static inline f32_vec gelu(f32_vec x) {
    const u32_vec negative = (u32_vec)(x < 0);
    const f32_vec tail = 0.5f * erfc_nonnegative((f32_vec)((u32_vec)x & 0x7fffffff) * 0.70710678f);
    return x * (f32_vec)((negative & (u32_vec)tail) | (~negative & (u32_vec)(1.0f - tail)));
}

/* tanh(x), also where x is so small that 1 - e^(-2x) has few digits. */
static inline f32_vec tanh_precise(f32_vec x) {
    const f32_vec s = x * x;
    const u32_vec is_small = (u32_vec)(s < 0.09f);
    const f32_vec sum = -0.33333333f + s * (0.13333333f + s * (-0.05396825f + s * 0.02186949f));
    return (f32_vec)((is_small & (u32_vec)(x + x * s * sum)) | (~is_small & (u32_vec)tanh_f32(x)));
}

/* e^x with a relative error below 5e-7: 0 where it would be denormal, infinite from 2^127.5 on. */
static inline f32_vec exp_f32(f32_vec x) {
    x = -max_vec((f32_vec){0} - 89.0f, -max_vec((f32_vec){0} - 104.0f, x));
    const f32_vec power = x * LOG2_E, rest = fma_vec(x, broadcast(1.92596299e-8f), fma_vec(x, broadcast(LOG2_E), -power));
    return exp2_f32(power) * fma_vec(rest, broadcast(0.693147181f), broadcast(1.0f));
}

/* log(1 + e^x) = max(x, 0) + log(1 + e^-|x|), the latter as 2 artanh(z) for z = e^-|x| / (2 + e^-|x|). */
static inline f32_vec softplus(f32_vec x) {
    const f32_vec e = exp_f32((f32_vec)((u32_vec)x | 0x80000000));
    const f32_vec z = e / (2.0f + e), w = z * z;
    f32_vec sum = fma_vec(w, broadcast(0.134337753f), broadcast(0.141169786f));
    sum = fma_vec(w, fma_vec(w, sum, broadcast(0.200038359f)), broadcast(0.333333194f));
    return max_vec((f32_vec){0}, x) + fma_vec(2.0f * z * w, sum, 2.0f * z);
}

static inline f32_vec activate(f32_vec x, int64_t kind) { /* in the order of activations.py */
    switch (kind) {
    case 0: return silu(x);
    case 1: return gelu_tanh(x);
    case 2: return gelu(x);
    case 3: return max_vec((f32_vec){0}, x);
    case 4: x = max_vec((f32_vec){0}, x); return x * x;
    case 5: return tanh_precise(x);
    case 6: return sigmoid(x);
    case 7: return exp_f32(x);
    default: return softplus(x);
    }
}

#endif
