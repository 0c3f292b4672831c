"""Sampling parameters and logprob options that random requests choose from."""

from tgis.ipc.request import LogprobOptions, SamplingParams

KINDS = [
    SamplingParams(),
    SamplingParams(repetition_penalty=1.3),
    SamplingParams(length_penalty=(2, 1.4)),
    SamplingParams(min_new_tokens=6, repetition_penalty=0.8),
    SamplingParams(temperature=1.2),
    SamplingParams(temperature=0.9, repetition_penalty=1.2, length_penalty=(1, 1.2)),
    SamplingParams(temperature=1.5, top_p=0.9),
    SamplingParams(temperature=1.5, typical_p=0.8),
    SamplingParams(temperature=1.1, top_k=7, top_p=0.9, typical_p=0.9, repetition_penalty=1.1, min_new_tokens=3),
]


WISHES = [
    LogprobOptions(),
    LogprobOptions(),
    LogprobOptions(generated_tokens=True, logprobs=True),
    LogprobOptions(generated_tokens=True, logprobs=True, ranks=True, top_n_tokens=3),
    LogprobOptions(generated_tokens=True, input_tokens=True, logprobs=True, ranks=True),
]
