"""Sampling parameters and logprob options that random requests draw from."""

from tgis.ipc.messages import Details, Sampling

KINDS = [
    Sampling(),
    Sampling(repetition_penalty=1.3),
    Sampling(length_penalty=(2, 1.4)),
    Sampling(min_new_tokens=6, repetition_penalty=0.8),
    Sampling(temperature=1.2),
    Sampling(temperature=0.9, repetition_penalty=1.2, length_penalty=(1, 1.2)),
    Sampling(temperature=1.5, top_p=0.9),
    Sampling(temperature=1.5, typical_p=0.8),
    Sampling(temperature=1.1, top_k=7, top_p=0.9, typical_p=0.9, repetition_penalty=1.1, min_new_tokens=3),
]


WISHES = [
    Details(),
    Details(),
    Details(generated=True, logprobs=True),
    Details(generated=True, logprobs=True, ranks=True, top_n=3),
    Details(generated=True, inputs=True, logprobs=True, ranks=True),
]
