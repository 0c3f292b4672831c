"""Loading a model from a local directory: device, dtype, weights. No download, no remote code."""

import inspect
import logging
import time
from dataclasses import dataclass, fields
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedConfig, PreTrainedModel
from transformers.distributed import DistributedConfig

from tgis.engines.kernels.cpu.fused_ops import fuse
from tgis.engines.kernels.cpu.linear import pack_linears
from tgis.engines.loading.merged_linear import merge_siblings
from tgis.engines.loading.rope import fix_frequencies
from tgis.engines.memory.available import in_words, taken_memory
from tgis.engines.memory.model_size import check_size
from tgis.engines.padded.model import ModelFacts
from tgis.errors import StartError, Unsupported
from tgis.ipc.messages import EngineOptions
from tgis.utils.log_progress import told

log = logging.getLogger(__name__)

_ATTENTION = frozenset({"full_attention", "sliding_attention", "chunked_attention"})


@dataclass(frozen=True, slots=True)
class Accepts:
    """Which optional arguments the model's forward knows."""

    position_ids: bool
    logits_to_keep: bool
    inputs_embeds: bool


def pick_device(options: EngineOptions) -> torch.device:
    """CUDA where there is one, with the process's share of its memory; else the CPU with its threads."""
    if torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(options.cuda_memory_fraction)
        return torch.device("cuda", torch.cuda.current_device())
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    return torch.device("cpu")


def load_config(options: EngineOptions) -> PreTrainedConfig:
    """What the model's config.json says."""
    return AutoConfig.from_pretrained(options.model_path, local_files_only=True, trust_remote_code=False)


def load_causal_lm(options: EngineOptions, device: torch.device) -> tuple[PreTrainedModel, Accepts]:
    """A decoder-only model, ready for inference on the device, its linear layers packed on the CPU."""
    if load_config(options).is_encoder_decoder:
        raise Unsupported(f"{options.model_path} is an encoder-decoder")
    model = _ready(AutoModelForCausalLM, options, device)
    parameters = inspect.signature(model.forward).parameters
    return model, Accepts(*(field.name in parameters for field in fields(Accepts)))


def load_seq2seq_lm(options: EngineOptions, device: torch.device) -> PreTrainedModel:
    """An encoder-decoder model, ready in the same way."""
    return _ready(AutoModelForSeq2SeqLM, options, device)


def facts_of(model: PreTrainedModel) -> ModelFacts:
    """What a model is."""
    vocab_size = model.get_output_embeddings().weight.shape[0]
    return ModelFacts(type(model).__name__, model.dtype, vocab_size, model.config.is_encoder_decoder)


def _ready(family: Any, options: EngineOptions, device: torch.device) -> PreTrainedModel:
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    started = time.monotonic()
    config = load_config(options)
    dtype = getattr(torch, options.dtype) if options.dtype else _default_dtype(config, device)
    log.info("loading %s as %s on %s", options.model_path, str(dtype).removeprefix("torch."), device)
    check_size(family, options, config, dtype, device)
    longest = options.max_sequence_length
    with told(lambda: f"{in_words(taken_memory(device))} in memory after {time.monotonic() - started:.0f} s"):
        model = _finished(_load(family, options, config, dtype).eval().to(device), config, device, longest)
    log.info("loaded %s in %.1f s", type(model).__name__, time.monotonic() - started)
    return model


def _finished(model: PreTrainedModel, config: PreTrainedConfig, device: torch.device, longest: int) -> PreTrainedModel:
    """Its rotary embeddings made steady, its linear layers faster."""
    if fixed := fix_frequencies(model, longest):
        log.info("fixed the frequencies of %d rotary embeddings to those of %d tokens", fixed, longest)
    if device.type == "cpu":  # where merging was measured to bring nothing beyond packing
        log.info("packed %d linear layers, fused the small operators of %d others", pack_linears(model), fuse(model))
    else:
        log.info("merged %d linear layers into wider ones", merge_siblings(model, **_example(config, device)))
    return model


def _example(config: PreTrainedConfig, device: torch.device) -> dict[str, torch.Tensor]:
    """What a pass of the model needs, two tokens of it."""
    names = ("input_ids", "decoder_input_ids") if config.is_encoder_decoder else ("input_ids",)
    return {name: torch.ones(1, 2, dtype=torch.int64, device=device) for name in names}


def _load(family: Any, options: EngineOptions, config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    path = options.model_path
    try:
        model = family.from_pretrained(
            path,
            config=config,
            dtype=dtype,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            distributed_config=DistributedConfig(tp_size=options.shards),
        )
    except (ValueError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise StartError(f"{path}: {family.__name__} cannot load it: {reason}") from error
    if _keeps_more(model):  # what it keeps is no KV cache, and rows could not leave
        raise StartError(f"{path}: models that keep more than a KV cache ({config.model_type}) are not supported")
    return model


def _keeps_more(model: PreTrainedModel) -> bool:
    """Whether some layer is not attention over the keys and values of all tokens: a convolution, a state space."""
    kinds = getattr(model.config.get_text_config(decoder=True), "layer_types", None) or ()
    return model._is_stateful or not _ATTENTION.issuperset(kinds)


def _default_dtype(config: PreTrainedConfig, device: torch.device) -> torch.dtype:
    """Half precision wherever the hardware computes in it."""
    if device.type == "cuda":
        saved = config.get_text_config(decoder=True).dtype
        return saved if saved in (torch.float16, torch.bfloat16) else torch.bfloat16
    return torch.bfloat16 if torch.cpu._is_avx512_bf16_supported() else torch.float32
