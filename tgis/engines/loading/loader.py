"""Loading a model from a local directory: device, dtype, weights. No download, no remote code."""

import copy
import itertools
import logging
import re
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.nn.modules.module import register_module_forward_pre_hook
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from tgis.engines.kernels.cpu.embedding import TokenEmbeddings
from tgis.engines.kernels.cpu.experts import experts_of, pack_experts, packable_experts
from tgis.engines.kernels.cpu.fused_ops import fuse
from tgis.engines.kernels.cpu.library import CpuKernels, computes_in_bf16, load_kernels
from tgis.engines.kernels.cpu.linear import GemmSelector, pack_linears
from tgis.engines.loading.merged_linear import merge_linears
from tgis.engines.loading.rope import freeze_frequencies
from tgis.engines.loading.stored_experts import check_finite, read_experts, store_experts
from tgis.engines.memory.available import used_memory
from tgis.engines.memory.largest_step import step_bytes
from tgis.engines.memory.model_size import SizedModel, check_model_fits
from tgis.engines.quantization.checkpoint import read_tensors
from tgis.engines.quantization.config import Quantization, kept_as_saved, resolve_quantization
from tgis.engines.quantization.mxfp4 import coded_tensors, widened_tensors
from tgis.engines.sharding.collectives import collectives_of
from tgis.engines.sharding.sharded_model import Sharding, check_quantized
from tgis.errors import StartError, library_errors
from tgis.ipc.messages import EngineInfo, EngineOptions
from tgis.utils.progress import watched

log = logging.getLogger(__name__)

DEFAULT_MAX_BATCH_SIZE = {"cpu": 64, "cuda": 256}
_POSITION_TABLE = re.compile(r"\b(wpe|embed_positions)(\.weight)?$")  # all names in transformers, for decoders
NO_TABLE = 1 << 40  # positions
_ATTENTION_LAYERS = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
_MAX_NAMES = 3  # weights named in a warning
_TEXT_TOWER = {  # names of its weights in checkpoints of models for images, and as the text model has them
    r"^language_model\.lm_head\.": "lm_head.",
    r"^(model\.)?(language_model|text_model)\.(model\.)?": "model.",
}


def select_device(options: EngineOptions) -> torch.device:
    """CUDA if present, limited to the process's share of its memory, else the CPU; sets the CPU threads for both."""
    torch.set_num_threads(options.num_threads)
    if torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(options.cuda_memory_fraction)
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def select_kernels(options: EngineOptions, device: torch.device) -> CpuKernels | None:
    """The C kernels for this device, if it is a CPU and has any."""
    return load_kernels(options.cpu_isa, options.cache_dir) if device.type == "cpu" else None


def load_config(options: EngineOptions) -> PreTrainedConfig:
    path = options.model_path
    with library_errors(path):
        kind = PreTrainedConfig.get_config_dict(path, local_files_only=True)[0].get("model_type")
        if kind is not None and not (isinstance(kind, str) and kind in CONFIG_MAPPING):
            known = f"transformers {transformers.__version__} has no models of type {kind!r:.40}"
            raise StartError(f"{path}: {known}, and the code of a model is never run")
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        if getattr(config.get_text_config(decoder=True), "num_hidden_layers", 1) < 1:
            raise StartError(f"{path}: num_hidden_layers must be at least 1")
        return _text_tower(config)


def _text_tower(config: PreTrainedConfig) -> PreTrainedConfig:
    """The configuration of the text model in a model of text and images that transformers loads as nothing else."""
    text = config.get_text_config(decoder=True)
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or type(text) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return config
    if getattr(config, "quantization_config", None):
        raise StartError(f"{config.name_or_path}: quantized checkpoints of {config.model_type} are not supported")
    text.tie_word_embeddings = config.tie_word_embeddings
    text.text_tower_of = config.model_type
    return text


def engine_info(
    engine: str, model: PreTrainedModel, options: EngineOptions, device: torch.device, **others: Any
) -> EngineInfo:
    """What an engine says of itself before `warm_up` has found its token capacity."""
    return EngineInfo(
        engine=engine,
        model_class=type(model).__name__,
        device=str(device),
        dtype=str(model.dtype).removeprefix("torch."),
        quantize=model.quantized_as,
        vocab_size=model.get_output_embeddings().out_features,
        input_vocab_size=input_vocab_size(model),
        encoder_decoder=model.config.is_encoder_decoder,
        max_batch_size=options.max_batch_size or DEFAULT_MAX_BATCH_SIZE[device.type],
        token_capacity=0,
        forced_bos_token_id=model.generation_config.forced_bos_token_id if model.config.is_encoder_decoder else None,
        **others,
    )


def max_positions(model: PreTrainedModel) -> int:
    """The size of the model's table of positions; practically unlimited if it has none."""
    tensors = itertools.chain(model.named_parameters(), model.named_buffers())
    if not any(_POSITION_TABLE.search(name) for name, _ in tensors):
        return NO_TABLE
    return int(model.config.max_position_embeddings)


def input_vocab_size(model: PreTrainedModel) -> int:
    """The number of token ids with an embedding and, in a decoder-only model, a logit."""
    if model.config.is_encoder_decoder:  # some have a vocabulary of their own for each part
        return int(model.get_encoder().get_input_embeddings().num_embeddings)
    return int(min(model.get_input_embeddings().num_embeddings, model.get_output_embeddings().out_features))


def load_generation_config(options: EngineOptions, config: PreTrainedConfig) -> GenerationConfig:
    with library_errors(options.model_path):
        if (Path(options.model_path) / "generation_config.json").is_file():
            return GenerationConfig.from_pretrained(options.model_path, local_files_only=True)
        return GenerationConfig.from_model_config(config)


def look_at_model(
    options: EngineOptions, device: torch.device
) -> tuple[Any, PreTrainedConfig, torch.dtype, Quantization | None, SizedModel]:
    """The class of transformers that loads the model, its configuration, dtype, how it is quantized, and its size.
    StartError if it is too big, or quantized in groups that ranks cannot share.
    """
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    config = load_config(options)
    auto_class = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    with library_errors(f"{options.model_path}: {auto_class.__name__} cannot load it"):
        dtype = getattr(torch, options.dtype) if options.dtype else default_dtype(options, config, device)
        quantization = resolve_quantization(options, config, dtype)
        if quantization is None and device.type == "cpu":
            quantization = kept_as_saved(auto_class, options, config, dtype)
        weights = f", linear layers {quantization}" if quantization else ""
        log.info("loading %s as %s on %s%s", options.model_path, str(dtype).removeprefix("torch."), device, weights)
        with torch.device("meta"):
            model = auto_class.from_config(copy.deepcopy(config), dtype=dtype, trust_remote_code=False)
        if has_other_state(model) and (options.num_shards > 1 or device.type == "cuda"):
            kind = f"{options.model_path}: {type(model).__name__} has recurrent layers"
            raise StartError(f"{kind}: NUM_SHARD must be 1, and the device a CPU")
        kernels = select_kernels(options, device) if experts_of(model) and options.num_shards == 1 else None
        checkpoint = quantization.checkpoint if quantization else None
        model.stored_experts = {}
        if kernels:
            path, is_mxfp4 = Path(options.model_path), getattr(config, "quantization_config", None)
            tensors = checkpoint.tensors if checkpoint else coded_tensors(path) if is_mxfp4 else read_tensors(path)[0]
            model.stored_experts = store_experts(model, packable_experts(model, kernels, dtype), tensors)
        if checkpoint:
            checkpoint.leave_out({name for weight in model.stored_experts.values() for name in weight.parts})
        needed = check_model_fits(model, options, device, quantization)
        if checkpoint and options.num_shards > 1:
            check_quantized(model, checkpoint.layers, options.num_shards)
        return auto_class, config, dtype, quantization, (model, needed)


def load_model(options: EngineOptions, device: torch.device) -> PreTrainedModel:
    """The model, optimized for inference on the device."""
    started = time.monotonic()
    auto_class, config, dtype, quantization, (sized, needed) = look_at_model(options, device)
    select_kernels(options, device)  # may compile them first, which says so
    before = used_memory(device)
    progress = watched("loading weights", lambda: max(used_memory(device) - before, 0), needed, "B")
    checkpoint = quantization.checkpoint if quantization else None
    sharding = None
    if options.num_shards > 1:
        collectives = collectives_of(options, select_kernels(options, device), dtype)
        sharding = Sharding(sized, collectives, is_quantized=checkpoint is not None)
    with library_errors(f"{options.model_path}: {auto_class.__name__} cannot load it"), progress:
        state_dict = _state_dict(options, config, dtype, quantization, sized)
        loaded = "auto" if quantization and not checkpoint else dtype
        if state_dict is not None:
            if type(sized.config) is not type(config):  # transformers builds the text model alone
                config = sized.config
            model = _from_pretrained(type(sized), options, config, loaded, sharding, state_dict=state_dict)
            model.generation_config = load_generation_config(options, config)
        else:
            model = _from_pretrained(auto_class, options, config, loaded, sharding)
        if checkpoint:
            checkpoint.attach(model)
        model.stored_experts = sized.stored_experts
        if sharding:
            sharding.shard(model)
            sharding.install_collectives(model)
        model.eval().to("cpu" if quantization else device)  # a quantized layer moves when it is packed
        _check_finite(model, options.model_path)
        if quantization:
            _convert_buffers(model, like=sized)
        _check_written(model, packed=False)
        _optimize(model, options, device, quantization)
        model.to(device)
        _check_written(model, packed=True)
        if sharding:
            sharding.install_collectives(model)
    model.base_model.warn_if_padding_and_no_attention_mask = lambda *_: None  # it would read input ids on the host
    model.quantized_as, model.sharding = quantization.name if quantization else "none", sharding
    model.step_bytes = partial(step_bytes, sized)
    log.info("loaded %s in %.1f s", type(model).__name__, time.monotonic() - started)
    return model


def _state_dict(
    options: EngineOptions, config: Any, dtype: torch.dtype, quantization: Quantization | None, sized: PreTrainedModel
) -> dict[str, Any] | None:
    """The tensors that transformers loads; None: those in the files. Placeholders tell where codes are, and stand for
    stored weights.
    """
    stored, checkpoint = sized.stored_experts, quantization.checkpoint if quantization else None
    if checkpoint:
        tensors: dict[str, Any] = checkpoint.state_dict(dtype)
    elif vars(config).pop("quantization_config", None):
        tensors = widened_tensors(Path(options.model_path), dtype)
    elif stored:
        tensors, _ = read_tensors(Path(options.model_path))
    else:
        return None
    names = {name for weight in stored.values() for name in weight.parts}
    tensors = {name: tensor for name, tensor in tensors.items() if name not in names}
    zero = torch.zeros((), dtype=dtype if checkpoint or not quantization else config.dtype)
    return tensors | {name: zero.expand(sized.get_parameter(name).shape) for name in stored}


def _optimize(
    model: PreTrainedModel, options: EngineOptions, device: torch.device, quantization: Quantization | None
) -> None:
    """Freeze the frequencies of rotary embeddings, quantize what is to be quantized, and make layers faster."""
    for module in model.modules():
        if type(module).__name__ == "FalconLinear":  # it rounds before it adds the bias, and does nothing else
            module.__class__ = torch.nn.Linear
    longest = options.max_sequence_length
    fixed = freeze_frequencies(model, longest)
    model.fixed_frequencies = bool(fixed)
    if fixed:
        log.debug("fixed the frequencies of %d rotary embeddings to those of %d tokens", fixed, longest)
    kernels = select_kernels(options, device)
    gemms = GemmSelector(kernels, quantization) if device.type == "cpu" else None
    if quantization and device.type != "cpu":
        from tgis.engines.kernels.cuda.quantized import DeviceGemms  # noqa: PLC0415 - needs Triton

        gemms = DeviceGemms(quantization, device)
    dtype = quantization.dtype if quantization else model.dtype
    if gemms and kernels:
        pack_experts(model, gemms, kernels, dtype, partial(read_experts, model, dtype))
    called_classes: set[type] = set()
    with register_module_forward_pre_hook(lambda module, _: called_classes.add(type(module))):
        merge_linears(model, gemms.pack if gemms else None, **_dummy_inputs(model))
    if gemms:
        embeddings = TokenEmbeddings(model)
        pack_linears(model, gemms)
        if kernels:
            embeddings.pack(model, kernels, dtype)
        if quantization:
            _convert_others(model, quantization.dtype)
        by = ", ".join(f"{count} for {name}" for name, count in gemms.counts.items()) or "PyTorch multiplies"
        fused = fuse(model, kernels, called_classes)
        log.debug(
            "packed %d linear layers (%s), fused the small operators of %d others", gemms.counts.total(), by, fused
        )


def _convert_buffers(model: PreTrainedModel, like: PreTrainedModel) -> None:
    """Give buffers the dtypes that they have in the other model."""
    for name, other in like.named_buffers():
        buffer = model.get_buffer(name)
        buffer.data = buffer.data.to(other.dtype)


def _convert_others(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Convert weights that were not quantized from the dtype of the files, as if they had been loaded as `dtype`."""
    loaded, kept = model.config.dtype, model._get_dtype_plan(dtype)  # names that stay in float32
    for name, parameter in model.named_parameters():
        if parameter.dtype == loaded and not any(re.search(pattern, name) for pattern in kept):
            parameter.data = parameter.data.to(dtype)
    model.config.dtype = dtype


def _dummy_inputs(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    names = ("input_ids", "decoder_input_ids") if model.config.is_encoder_decoder else ("input_ids",)
    return {name: torch.ones(1, 2, dtype=torch.int64, device=model.device) for name in names}


def _from_pretrained(
    model_class: Any,
    options: EngineOptions,
    config: PreTrainedConfig,
    dtype: torch.dtype | str,
    sharding: Sharding | None = None,
    **source: Any,
) -> PreTrainedModel:
    """The model in the files of its directory, or in `state_dict`; if it is shared, this rank's part."""
    path = options.model_path
    parts = (config, *(getattr(config, name) for name in config.sub_configs))
    caps = any(getattr(part, "attn_logit_softcapping", None) for part in parts)
    attention = "eager" if caps else None  # transformers 5.17 would choose SDPA, which leaves soft caps out
    model, loading = model_class.from_pretrained(
        None if source else path,
        config=config,
        dtype=dtype,
        local_files_only=True,
        trust_remote_code=False,
        use_safetensors=True,
        attn_implementation=attention,
        distributed_config=sharding.loading if sharding else None,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # else an error that does not say which
        key_mapping=_TEXT_TOWER if hasattr(config, "text_tower_of") else None,
        **source,
    )
    kind = type(model).__name__
    for name, shape, expected in sorted(loading["mismatched_keys"])[:1]:
        raise StartError(f"{path}: {name} has the shape {[*shape]} in the files, {[*expected]} in {kind}")
    if missing := sorted(loading["missing_keys"]):  # transformers would fill them with random numbers
        raise StartError(f"{path}: {len(missing)} weights of {kind} are missing, {missing[0]} for one")
    if hasattr(config, "text_tower_of"):
        log.info("%s is served as %s, without its other parts", config.text_tower_of, kind)
    elif unused := sorted(loading["unexpected_keys"]):
        names = ", ".join([*(f"{name:.100}" for name in unused[:_MAX_NAMES]), *["..."] * (len(unused) > _MAX_NAMES)])
        log.warning("%s: %d weights in the files have no place in %s: %s", path, len(unused), kind, names)
    return model


def _check_written(model: PreTrainedModel, *, packed: bool) -> None:
    """No parameter is a placeholder, except those of quantized layers and stored experts until they are packed."""
    for name, module in model.named_modules():
        for kind, weight in module.named_parameters(recurse=False):
            is_written = weight.untyped_storage().nbytes() >= weight.nbytes
            may_wait = not packed and (hasattr(module, "quantized") or f"{name}.{kind}" in model.stored_experts)
            assert is_written or may_wait, f"{name}.{kind} is a placeholder"


def _check_finite(model: PreTrainedModel, path: str) -> None:
    for name, weight in model.named_parameters():
        # Weights of one byte are quantized.
        checkable = weight.is_floating_point() and weight.itemsize > 1 and weight.numel() > 0
        if checkable and any(weight.stride() or [1]):  # else a placeholder
            check_finite(f"{path}: the weight {name}", weight.detach(), weight.dtype)


def has_other_state(model: PreTrainedModel) -> bool:
    """Whether some layer keeps state other than keys and values of all tokens: a convolution, a state space."""
    kinds = getattr(model.config.get_text_config(decoder=True), "layer_types", None)
    return not _ATTENTION_LAYERS.issuperset(kinds) if kinds else model._is_stateful  # hybrids may be all attention


def default_dtype(options: EngineOptions, config: PreTrainedConfig, device: torch.device) -> torch.dtype:
    """Half precision if the hardware computes in it."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):  # such as V100 and T4
        return torch.float16
    if device.type == "cuda":
        saved = config.get_text_config(decoder=True).dtype
        return saved if saved in (torch.float16, torch.bfloat16) else torch.bfloat16
    return torch.bfloat16 if computes_in_bf16(options.cpu_isa) else torch.float32
