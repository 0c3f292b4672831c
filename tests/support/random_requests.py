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
    SamplingParams(bad_words=((4, 4), (5,), (6, 7, 8)), stop_token_ids=(9, 3), min_new_tokens=4),
    SamplingParams(allowed_token_ids=(3, 4, 5, 6, 7), bad_words=((4,), (5, 6), (6, 5), (3, 3))),
    SamplingParams(temperature=1.4, min_p=0.6, frequency_penalty=0.1),
    SamplingParams(temperature=1.3, min_p=0.02, top_k=9, bad_words=((7, 7),), allowed_token_ids=tuple(range(20))),
    SamplingParams(temperature=1.1, top_k=7, top_p=0.9, typical_p=0.9, repetition_penalty=1.1, min_new_tokens=3),
]


WISHES = [
    LogprobOptions(),
    LogprobOptions(),
    LogprobOptions(generated_tokens=True, logprobs=True),
    LogprobOptions(generated_tokens=True, logprobs=True, ranks=True, top_n_tokens=3),
    LogprobOptions(generated_tokens=True, input_tokens=True, logprobs=True, ranks=True),
]
