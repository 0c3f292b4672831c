"""Weights of GPTQ's files, one number at a time."""

import numpy as np


def unpack(tensors: dict[str, np.ndarray], bits: int, stored_less: int) -> np.ndarray:  # [out, in]
    """What `qweight`, `qzeros`, `scales` and `g_idx` of a layer stand for; zeros are stored less this number."""
    weights, zeros = tensors["qweight"].view(np.uint32), tensors["qzeros"].view(np.uint32)
    scales, groups = tensors["scales"], tensors["g_idx"]
    in_a_word, largest = 32 // bits, 2**bits - 1
    expected = np.zeros((weights.shape[1], len(groups)))
    for n in range(weights.shape[1]):
        for k in range(len(groups)):
            group = int(groups[k])
            code = int(weights[k // in_a_word, n]) >> k % in_a_word * bits & largest
            zero = int(zeros[group, n // in_a_word]) >> n % in_a_word * bits & largest
            expected[n, k] = float(scales[group, n]) * (code - zero - stored_less)
    return expected
