"""The memory of a model's largest step beside the KV cache, estimated from its shapes.

The factors were fitted to measurements of several models on CPUs.
"""

from transformers import PreTrainedModel

_STEP_BYTES = 8 << 20  # overhead of any step
_HIDDEN_COPIES, _BIAS_COPIES = 5, 2  # copies of the widest layer's outputs and of the position bias
_POSITION_BIAS = "relative_attention_bias.weight"  # models with one compute a bias for all pairs of tokens
_SCORE_BYTES, _BLOCK_SCORE_BYTES = 36, 60  # bytes per score that is sampled from, and per score of the first block
_BLOCK_BYTES = {"cpu": 30 << 20, "cuda": 960 << 20}  # size of a block of scores
_LOGITS_COPIES = 3  # copies of the prompts' logits that exist at the same time
_FLOAT_BYTES = 4
_EXPERT_WEIGHT_DIMS = 3
_TOP_K_NAMES = ("top_k", "num_experts_per_tok")


def step_bytes(
    model: PreTrainedModel,
    device: str,
    rows: int,
    tokens: int,
    *,
    logits: int = 0,
    logprobs: int = 0,
    pairs: bool = True,
) -> int:
    """Bytes of a step of so many tokens that computes `logits` of them and samples for a batch of `rows`. One has the
    prompt logprobs of `logprobs` tokens. Biases of positions are computed for `pairs` of tokens.
    """
    head = model.get_output_embeddings().weight
    vocab_size, scores = head.shape[0], head.shape[0] * rows
    shapes = {name: weight.shape for name, weight in model.named_parameters() if weight.dim() > 1}
    width: int = max((max(shape[-2:]) for shape in shapes.values() if vocab_size not in shape), default=0)
    biases = [shape[1] for name, shape in shapes.items() if pairs and name.endswith(_POSITION_BIAS)]
    heads = max(biases, default=0)
    hidden = (tokens * width * _HIDDEN_COPIES + tokens**2 * heads * _BIAS_COPIES) * head.itemsize
    sampling = scores * _SCORE_BYTES + min(scores * _BLOCK_SCORE_BYTES, _BLOCK_BYTES[device])
    hidden += _expert_bytes(model, tokens)
    step: int = _STEP_BYTES + hidden + max(sampling, logits * vocab_size * head.itemsize)
    return max(step, prompt_logits_bytes(logprobs, vocab_size, device))


def _expert_bytes(model: PreTrainedModel, tokens: int) -> int:
    """Bytes of the inputs and outputs of experts: a row for each token and expert that it chooses."""
    weights = [weight for weight in model.parameters() if weight.dim() == _EXPERT_WEIGHT_DIMS]
    top_k: int = max(getattr(module, name, None) or 0 for module in model.modules() for name in _TOP_K_NAMES)
    row_bytes = max((sum(weight.shape[1:]) * weight.itemsize for weight in weights), default=0)
    return tokens * top_k * row_bytes


def prompt_logits_bytes(tokens: int, vocab_size: int, device: str) -> int:
    """Bytes that prompt logprobs take at least; a CPU's resident memory does not show them in every run."""
    return _LOGITS_COPIES * tokens * vocab_size * _FLOAT_BYTES if device == "cpu" else 0
