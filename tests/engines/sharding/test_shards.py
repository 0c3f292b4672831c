"""Models of all families with a plan: two and four ranks, forked in this machine, give what one gives, in lockstep."""

import itertools
import os
import random
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from batches import engine_options, limits
from cpu_kernels import CPU_ISA
from forked_processes import on_ranks
from gguf_files import permuted, write_directory, write_gguf
from lockstep import Texts, as_engine
from quantized_formats import (
    CHANNELS,
    FORMATS,
    TOKENS,
    Quantize,
    compressed_tensors,
    experts_in_mxfp4,
    gptq,
    in_bytes,
    quantized_copy,
    with_input_scale,
)
from slow_cases import slow_except
from tiny_models import (
    ARCHITECTURES,
    VOCAB_SIZE,
    make_config,
    make_model,
    make_model_from_config,
    make_wide_config,
    outcomes,
)

from tgis.engines import describe_memory, load_shard
from tgis.engines.kernels.cpu.collectives import shared_bytes
from tgis.engines.kernels.cpu.replay import ResizablePass
from tgis.engines.paged.recorded_steps import RecordedSteps
from tgis.engines.paged.self_check import dummy_adapter, on_all_ranks
from tgis.engines.quantization.weight import INT4, QuantizedWeight
from tgis.engines.sharding.plans import check_groups, check_plan
from tgis.errors import StartError, Unsupported
from tgis.ipc.lookups import AdapterRef
from tgis.ipc.request import LogprobOptions, Request, SamplingParams
from tgis.prompts.soft_prompt import SoftPrompt

FAMILIES = (
    *("Bloom", "Falcon", "Falcon, alibi", "Falcon, 40b", "GPT2", "GPTBigCode", "GPTBigCode, many heads", "GPTNeoX"),
    *("GptOss", "Llama", "Mixtral", "Mpt", "OPT", "OPT, 350m", "OPT, galactica", "Olmo2", "Phi3", "Qwen2Moe", "Qwen3"),
    *("Bart", "M2M100", "Marian", "Marian, two vocabularies", "MT5", "T5", "T5, flan", "UMT5"),
)
PLANS = {(name, 2, "hf_transformers") for name in ("GptOss", "T5", "GPT2", "Bart", "Bloom")}  # each has one of its kind
FAST = {("Falcon, 40b", 4, "tgis_native"), ("Bloom", 2, "tgis_native")} | PLANS
WIDE = {"hidden_size": 64, "d_model": 64, "head_dim": 16, "intermediate_size": 128, "d_kv": 16, "d_ff": 128}
FEW_TOKENS = 8
PROMPT_TOKENS = 2
LORA = 3, 5
CANCELLED = {1: 3, 3: 5}  # after so many tokens
SHARED = "shared_memory"
ROUNDED: dict[str, tuple[dict[str, Any], Quantize]] = {  # activations in int8
    "static": (
        compressed_tensors("int-quantized", CHANNELS, input_activations=CHANNELS | {"strategy": "tensor"}),
        with_input_scale,
    ),
    "dynamic": (
        compressed_tensors("int-quantized", CHANNELS, input_activations=TOKENS),
        in_bytes(1, None, "weight_scale", e4m3=False),
    ),
}
LAYOUTS = {  # with groups of at most 32 inputs
    **FORMATS,
    "fp8": ({"quant_method": "fp8", "weight_block_size": [20, 16]}, in_bytes(20, 16, "weight_scale_inv")),
    **ROUNDED,
}
SAME_BITS = [("Llama", "bfloat16"), ("Bloom", "bfloat16"), ("GPT2", "float32"), ("Qwen3", "bfloat16")]
DETAILS = LogprobOptions(generated_tokens=True, input_tokens=True, logprobs=True)
Found = dict[int, tuple[list[int], list[float]]]  # tokens and logprobs, those of the input first


@pytest.mark.parametrize(
    ("name", "count", "engine"),
    slow_except(FAST, itertools.product(FAMILIES, (2, 4), ("tgis_native", "hf_transformers"))),
)
def test_ranks_give_what_one_gives(name: str, count: int, engine: str, tmp_path: Path) -> None:
    """Greedy and seeded, with rows that join, leave, are preempted, and have soft prompts and LoRA adapters."""
    compare(make_model_from_config(make_config(name), tmp_path), count, engine)


def test_what_fails_on_one_rank_fails_on_all() -> None:
    assert [*on_ranks(2, check_failing_on_one)] == ["it fails on another rank", "off by 0.1"]


def check_failing_on_one() -> str:
    with pytest.raises(Unsupported) as caught:
        on_all_ranks(failing if torch.distributed.get_rank() else int)
    return str(caught.value)


def failing() -> None:
    raise Unsupported("off by 0.1")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Llama", "T5", "Bart"])
def test_ranks_share_a_cache_in_codes(name: str, tmp_path: Path) -> None:
    compare(make_model_from_config(make_wide_config(name), tmp_path), 2, "tgis_native", 0.05, kv_cache_dtype="int8")


@pytest.mark.parametrize(
    ("name", "layout", "count", "engine"),
    slow_except(
        [("Llama", "gptq, act-order", 2, "tgis_native")],
        [
            *itertools.product(["Llama"], LAYOUTS, (2, 4), ["tgis_native"]),
            *itertools.product(
                ("T5", "Mpt", "Falcon, 40b", "Phi3", "Qwen2Moe"),
                ("awq", "gptq, act-order"),
                [2],
                ("tgis_native", "hf_transformers"),
            ),
        ],
    ),
)
@torch.no_grad()  # type: ignore[untyped-decorator]
def test_ranks_share_quantized_weights(name: str, layout: str, count: int, engine: str, tmp_path: Path) -> None:
    directory = make_quantizable(name, tmp_path)
    described, quantize = LAYOUTS[layout]
    quantized_copy(directory, {"gate$": None, "": quantize}, described)
    compare(directory, count, engine, 0.2 if layout in ROUNDED else 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_ranks_share_experts_in_mxfp4(count: int, tmp_path: Path) -> None:
    """Parts of 48 and 24 inputs begin within blocks of 32."""
    directory = make_model_from_config(make_config("GptOss", hidden_size=64, intermediate_size=96), tmp_path)
    experts_in_mxfp4(directory)
    compare(directory, count, "tgis_native")


def make_quantizable(name: str, directory: Path) -> Path:
    """A model with heads of 16 and a multiple of 64 inputs for each layer."""
    config = make_config(name)
    config.update({size: number for size, number in WIDE.items() if size in config.to_dict()})
    config.pad_token_id = VOCAB_SIZE - 1  # of the last rank
    return make_model_from_config(config, directory)


@pytest.mark.slow
@pytest.mark.parametrize(("bits", "tolerance"), [("int4", 1e-4), ("int8", 0.2)])
def test_ranks_quantize_their_parts(bits: str, tolerance: float, tmp_path: Path) -> None:
    how = {"quantize": bits, "quantize_logits": True, "quantize_activations": "none"}
    compare(make_quantizable("Llama", tmp_path), 2, "tgis_native", tolerance, **how)


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
def test_ranks_share_a_vocabulary_in_codes(tied: bool, tmp_path: Path) -> None:
    config = make_wide_config("Llama")
    config.intermediate_size, config.tie_word_embeddings = 128, tied
    write_directory(tmp_path, config)
    write_gguf(tmp_path / "model.gguf", config, "llama", "Q4_0", permuted)
    compare(tmp_path, 2, "tgis_native")


def test_groups_that_would_be_cut_are_refused(tmp_path: Path) -> None:
    directory = make_model_from_config(make_config("Llama"), tmp_path)
    with torch.no_grad():
        quantized_copy(directory, gptq(4, 16, 1), FORMATS["gptq"][0])
    error = r"^NUM_SHARD=2 cuts groups of 16 of the 48 inputs of model.layers.1.mlp.down_proj; these would do: 1$"
    with pytest.raises(StartError, match=error):
        on_ranks(2, generate, directory, 2, "tgis_native", {})
    with pytest.raises(StartError, match=error):  # `tgis serve --check`
        describe_memory(engine_options(directory, 4, num_shards=2))
    weights = {"o_proj": in_groups(32, 16), "down_proj": in_groups(48, 8), "whole": in_groups(5, 5)}
    check_groups(weights, make_config("Llama"), 2)
    with pytest.raises(StartError, match=r"^NUM_SHARD=4 cuts groups of 16 of the 32 inputs of o_proj; .* do: 1, 2$"):
        check_groups(weights, make_config("Llama"), 4)


def in_groups(inputs: int, size: int) -> QuantizedWeight:
    return QuantizedWeight(torch.zeros(1, inputs).byte(), INT4, torch.ones(1, inputs // size), group_size=size)


@pytest.mark.skipif(CPU_ISA == "none", reason="bits depend on the batch")
@pytest.mark.parametrize(
    ("name", "dtype", "count"),
    slow_except([("Llama", "bfloat16", 2)], [*((*case, 2) for case in SAME_BITS), ("Llama", "float32", 4)]),
)
def test_bits_do_not_depend_on_neighbours_chunks_and_recording(
    name: str, dtype: str, count: int, tmp_path: Path
) -> None:
    """Through shared memory, and of four ranks over gloo, where nothing is recorded."""
    directory = make_model_from_config(make_wide_config(name), tmp_path)
    share = share_memory if count == 2 else Path
    options = count, "tgis_native", {"dtype": dtype}, False
    recorded, eager = (
        on_ranks(count, generate_and_count, *case, share(directory), *options, *sizes)
        for *case, sizes in ((True, (4, 40)), (False, (1, 7)))
    )
    for (found, prefills), (same, none) in zip(recorded, eager, strict=True):
        assert repr(found) == repr(same)  # nan is in it
        assert prefills > 1 or count > 2
        assert none == 0


def share_memory(directory: Path) -> Path:
    """Let two ranks reduce through memory that they share; more do it over gloo."""
    (directory / SHARED).write_bytes(bytes(shared_bytes(2)))
    return directory


def compare(directory: Path, count: int, engine: str, tolerance: float = 1e-4, **changes: Any) -> None:
    expected = generate(directory, 1, engine, changes)
    if count == 2:
        share_memory(directory)
    for found in on_ranks(count, generate, directory, count, engine, changes):
        assert {number: tokens for number, (tokens, _) in found.items()} == {
            number: tokens for number, (tokens, _) in expected.items()
        }
        for number, (_, logprobs) in expected.items():
            assert found[number][1] == pytest.approx(logprobs, abs=tolerance, nan_ok=True)


def generate(
    directory: Path,
    count: int,
    engine: str,
    changes: dict[str, Any],
    adapted: bool = True,
    rows: int = 4,
    chunk: int = 40,
) -> Found:
    values: dict[str, Any] = {"engine": engine, "num_shards": count, "kv_cache_bytes": 1 << 20}
    if (directory / SHARED).exists():
        memory = os.open(directory / SHARED, os.O_RDWR)
        values |= {"rank": torch.distributed.get_rank(), "shared_memory": memory}
    shard, reason = load_shard(engine_options(directory, **values | changes))
    assert not reason
    shard.warm_up()
    info = shard.info
    prompt = torch.randn(PROMPT_TOKENS, info.embedding_size, generator=torch.Generator().manual_seed(0))
    soft_prompt = SoftPrompt(1, None if info.encoder_decoder else prompt, prompt, info.encoder_decoder)
    lora = dummy_adapter(info.lora_targets, torch.float32, torch.device("cpu"))
    adapters: dict[int, Any] = {2: soft_prompt} | (dict.fromkeys(LORA, lora) if adapted and info.lora_targets else {})
    bounds = limits(90, max_batch_size=rows)
    if not info.padded:
        paged: dict[str, Any] = {"padded": False, "block_size": 16, "prefix_cache": True, "prefill_tokens": chunk}
        bounds = limits(90, max_batch_size=rows, encoder_decoder=info.encoder_decoder, **paged)
    got, _ = outcomes(
        shard, bounds, requests({3, 5} & adapters.keys()), random.Random(1), adapters, cancelled=CANCELLED
    )
    assert all(len(got[number].tokens) <= count for number, count in CANCELLED.items())
    return {n: (one.tokens, [fact.logprob for fact in (*one.inputs, *one.facts)]) for n, one in got.items()}


def generate_and_count(recording: bool, *args: Any) -> tuple[Found, int]:
    """What is generated, and how many steps with prompts have been replayed."""
    replays = list[tuple[int, ...]]()
    replay = ResizablePass.__call__

    def counted(prefill: ResizablePass, sizes: tuple[int, ...]) -> None:
        replays.append(sizes)
        replay(prefill, sizes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ResizablePass, "__call__", counted)
        if not recording:
            patch.setattr(RecordedSteps, "run", lambda *_: None)
        return generate(*args), len(replays)


def requests(adapters: Collection[int]) -> list[Request]:
    """Those of `adapters` have one."""
    draw, made = random.Random(0), []
    for number in range(6):
        tokens = [draw.randrange(3, 90) for _ in range(draw.randint(1, 25))]
        sampling = SamplingParams(temperature=1.0, seed=number) if number % 2 else SamplingParams()
        adapter = AdapterRef("l", 0, 0, 2, -1) if number in LORA and number in adapters else None
        if number == 2:
            tokens, adapter = [0] * PROMPT_TOKENS + tokens, AdapterRef("p", PROMPT_TOKENS, 0, 1, 1)
        made.append(Request(number, tokens, FEW_TOKENS, False, sampling, DETAILS, adapter=adapter))
    return made


@pytest.mark.parametrize(
    ("name", "shards", "message"),
    [
        ("Llama", 3, " does not divide the model's 4 attention and 2 key-value heads; these would do: 1, 2, 4"),
        ("Falcon", 8, " does not divide the model's 4 attention and 1 key-value heads; these would do: 1, 2, 4"),
        ("GPTNeo", 2, ": there is no tensor-parallel plan for gpt_neo"),
    ],
)
def test_what_does_not_divide_is_refused(name: str, shards: int, message: str) -> None:
    kind = getattr(transformers, f"{name}Config")
    with pytest.raises(StartError) as caught:
        check_plan(kind(**ARCHITECTURES[name]), shards)
    assert str(caught.value) == f"NUM_SHARD={shards}{message}"


def test_all_families_have_plans() -> None:
    for name in (*FAMILIES, "MBart", "Pegasus", "PLBart", "Blenderbot", "BlenderbotSmall"):
        check_plan(make_config(name), 2)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("Llama", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def texts_alone(llama: Path) -> Texts:
    return as_engine(llama, "as it is")[0]


@pytest.mark.parametrize("mode", slow_except(["rank 0 fails"], ["rank 0 fails", "all ranks fail"]))
def test_ranks_launch_the_same_steps(llama: Path, texts_alone: Texts, mode: str) -> None:
    (texts, launches), *others = on_ranks(2, as_engine, llama, mode)
    assert texts == texts_alone
    assert [kind for kind, _ in launches].count("ahead") > 20
    assert others == [({}, launches)]
