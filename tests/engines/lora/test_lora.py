"""LoRA adapters in both engines: what PEFT generates with untrained ones, and the bank that holds them."""

import gc
import random
import warnings
import weakref
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_batches import ENGINES, AdapterRequest, EngineSetup, check_mixed, generate_all, make_setup, store_for
from peft import LoraConfig, PeftModel, get_peft_model
from slow_cases import slow_except
from tiny_models import EOS, VOCAB_SIZE, check_greedy, make_model
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, LlamaConfig, LlamaForCausalLM

from tgis.batcher.admission import MAX_ADAPTER_RANKS
from tgis.batcher.sequence import Sequence, StepPlan
from tgis.engines.lora.adapter_bank import AdapterBank
from tgis.engines.lora.layers import LoraLayers
from tgis.engines.padded.model import MAX_PREFILL_TOKENS
from tgis.errors import Unsupported
from tgis.ipc.request import LogprobOptions
from tgis.prompts.lora import LoraAdapter, LoraLayerWeights
from tgis.prompts.soft_prompt import SoftPrompt


@pytest.fixture(autouse=True)
def no_model_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    """PEFT takes as long for one as for the adapter."""
    monkeypatch.setattr(PeftModel, "create_or_update_model_card", lambda *_: None)


def with_lora(base: Any, directory: Path, number: int, **options: Any) -> Any:
    """A PEFT model with a random adapter, saved; adapters of a directory have different ranks."""
    torch.manual_seed(number)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT's own, about what it corrects in the config
        config = LoraConfig(r=1 + 2 * number, lora_alpha=8, init_lora_weights=False, **options)
        adapted = get_peft_model(base, config).eval()
    for name, weight in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(weight, std=0.2)
    adapted.save_pretrained(directory / str(number))
    return adapted


# several kinds of layers: Linear and Conv1D, of two or three dimensions, merged QKV, with a router
MODELS = ["Llama", "GPT2", "GPTNeoX", "Mixtral", "DeepseekV3"]
MODELS += ["GPTBigCode", "OPT", "Bloom", "Falcon", "Gemma2", "Phi3"]
FAST = [("Llama", "paged"), ("GPT2", "padded"), ("GPTNeoX", "paged"), ("Mixtral", "padded"), ("DeepseekV3", "padded")]


@pytest.mark.parametrize(("name", "kind"), slow_except(FAST, product(MODELS, ENGINES)))
def test_every_kind_of_model_generates_what_peft_generates(name: str, tmp_path: Path, kind: str) -> None:
    tiny = make_model(name, tmp_path / "model")
    try:
        setup = make_setup(kind, tiny)
    except Unsupported:
        assert (name, kind) == ("DeepseekV3", "paged")
        return

    def base() -> Any:
        return AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32).eval()

    layers: Any = "all-linear"
    if name in ("Mixtral", "DeepseekV3"):  # of experts PEFT would change what are no layers, too
        layers = sorted(layer for layer in setup.engine.info.lora_targets if "self_attn" in layer)
    models = [base(), *(with_lora(base(), tmp_path, number, target_modules=layers) for number in (1, 2, 3))]
    store = store_for(setup, tmp_path)
    adapters: list[Any] = [None, *(store.find(str(number)).adapter for number in (1, 2, 3))]
    assert set(adapters[1].layers) == set(setup.engine.info.lora_targets if layers == "all-linear" else layers)
    assert check_mixed(setup, models, adapters) >= 7
    check_prompt_logprobs(setup, models[1], adapters[1])


def check_prompt_logprobs(setup: EngineSetup, model: Any, adapter: Any) -> None:
    tokens, details = [50, 62, 17, 30, 9], LogprobOptions(input_tokens=True, logprobs=True)
    with torch.no_grad():
        logprobs = model(input_ids=torch.tensor([tokens])).logits[0].log_softmax(-1)
    _, (facts,) = generate_all(setup, [AdapterRequest(tokens, adapter, 3, details)])
    expected = [float(logprobs[place, token]) for place, token in enumerate(tokens[1:])]
    assert [fact.logprob for fact in facts[1:]] == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize(
    ("name", "kind"),
    slow_except([("T5", "paged"), ("Bart", "padded")], product(("T5", "Bart", "T5Gemma", "M2M100", "LongT5"), ENGINES)),
)
def test_adapters_change_encoder_and_decoder_beside_soft_prompts(
    name: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if (name, kind) == ("LongT5", "paged"):
        pytest.skip("it is not paged")
    monkeypatch.setitem(MAX_PREFILL_TOKENS, "cpu", 6)
    tiny = make_model(name, tmp_path / "model")
    setup, rng = make_setup(kind, tiny), random.Random(2)

    def base() -> Any:
        return AutoModelForSeq2SeqLM.from_pretrained(tiny, dtype=torch.float32).eval()

    models = [with_lora(base(), tmp_path, number, target_modules="all-linear") for number in (1, 2)]
    store = store_for(setup, tmp_path)
    soft = SoftPrompt(9, None, torch.randn((4, 32)), encoder_decoder=True)
    adapters: list[Any] = [*(store.find(str(number)).adapter for number in (1, 2)), soft, None]
    tokens = [[rng.randrange(4, VOCAB_SIZE) for _ in range(rng.randint(3, 16))] for _ in range(16)]
    jobs = [AdapterRequest(tokens[n], adapters[n % 4], 10) for n in range(16)]
    generated, _ = generate_all(setup, jobs, eos=EOS)
    for n in range(16):
        if n % 4 < 2:
            check_greedy(models[n % 4], tokens[n], generated[n])
        else:
            assert generated[n] == generate_all(setup, [jobs[n]], eos=EOS)[0][0]


@pytest.mark.parametrize("kind", ENGINES)
def test_an_adapter_that_overflows_fails_only_its_own_sequence(kind: str, tmp_path: Path) -> None:
    """Its products are infinite for all sequences, and masked for all but its own."""
    setup = make_setup(kind, make_model("Llama", tmp_path))
    targets = setup.engine.info.lora_targets
    bad, good = (
        LoraAdapter(
            version,
            {name: LoraLayerWeights(torch.full((2, i), a), torch.ones(2, o)) for name, (i, o) in targets.items()},
        )
        for version, a in ((1, 3e38), (2, 0.1))
    )
    jobs = [AdapterRequest([5, 6, 7], adapter, 3) for adapter in (bad, good, None)]
    expected, _ = generate_all(setup, jobs[1:], eos=EOS)
    rows = [Sequence(job.request(next(setup.ids)), 0.0) for job in jobs]
    for at, (row, job) in enumerate(zip(rows, jobs, strict=True)):
        row.adapter, row.block_table = job.prompt, list(range(3 * at, 3 * at + 3))
    result = setup.engine.step(StepPlan.compute_all(rows))
    setup.engine.release(rows)
    assert list(result.failed) == [rows[0].id]
    assert result.tokens[1:] == [tokens[:1] for tokens in expected]


def small_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    return LlamaForCausalLM(LlamaConfig(hidden_size=8, vocab_size=9, **sizes)).eval()


def one_layer(layers: LoraLayers, version: int, rank: int) -> LoraAdapter:
    """An adapter of ones for the first layer."""
    name, (inputs, outputs) = next(iter(layers.targets.items()))
    return LoraAdapter(version, {name: LoraLayerWeights(torch.ones(rank, inputs), torch.ones(rank, outputs))})


@pytest.mark.parametrize("min_columns", [0, MAX_ADAPTER_RANKS])
def test_a_newcomer_evicts_only_idle_adapters_and_as_few_as_needed(min_columns: int) -> None:
    layers = LoraLayers(small_llama(), None, min_columns)
    first = [one_layer(layers, version, MAX_ADAPTER_RANKS // 16) for version in range(16)]
    idle, running, newcomer = first[::2], first[1::2], one_layer(layers, 16, MAX_ADAPTER_RANKS // 16 + 1)
    for adapters in (first, *[[one] for one in idle[2:]], running):
        layers.place(adapters)
    captured = layers._bank.version
    layers.place([newcomer])
    assert set(layers._bank.adapters) == {*idle[2:], *running, newcomer}
    joined = layers._bank.version
    assert joined == captured or not min_columns
    layers.place([*running, newcomer])
    assert layers._bank.version == joined


def test_a_bank_that_grows_needs_no_memory_for_both(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is replaced is gone before, also if there is no memory for the rest; then no adapter and no hook is left."""
    model = small_llama()
    layers = LoraLayers(model)
    first, second = (one_layer(layers, rank, rank) for rank in (4, 9))
    with layers.applied([first]):
        replaced = [weakref.ref(buffer) for buffer in layers._bank._buffers[next(iter(first.layers))]]
    assert all(ref() is not None for ref in replaced)

    def fail(*_: Any) -> None:
        gc.collect()
        assert all(ref() is None for ref in replaced)
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(AdapterBank, "_empty", fail)
    with pytest.raises(torch.OutOfMemoryError), layers.applied([first, second]):
        pass
    assert not layers._gemms
    assert not any(module._forward_hooks for module in model.modules())


def test_a_bank_keeps_adapters_apart_through_random_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    """The columns of each compute what its matrices compute; a failed update leaves nothing half written."""
    rng = random.Random(0)
    torch.manual_seed(0)
    everyone = []
    for version in range(12):
        rank, names = rng.randint(1, 9), rng.sample("abc", rng.randint(1, 3))
        ranks = {name: rng.randint(1, rank) for name in names}
        layers = {name: LoraLayerWeights(torch.randn(some, 5), torch.randn(some, 6)) for name, some in ranks.items()}
        everyone.append(LoraAdapter(version, layers))
    bank, x = AdapterBank(dict.fromkeys("abc", torch.float32)), torch.randn(5)
    for turn in range(200):
        here = set(bank.adapters)
        come = set(rng.sample(everyone, rng.randint(0, 3))) - here
        go = set(rng.sample(sorted(here, key=lambda one: one.version), rng.randint(0, min(3, len(here)))))
        if turn % 50 == 49 and come:
            with monkeypatch.context() as patch:
                patch.setattr(torch, "zeros", None)
                bank._capacity = 0  # so that it has to ask for memory
                with pytest.raises(TypeError):
                    bank.update(come, go)
            assert not bank.adapters
            assert not bank.layers
            continue
        bank.update(come, go)
        assert set(bank.adapters) == (here | come) - go
        width = sum(one.rank + one.rank % 2 for one in bank.adapters)
        order = sorted(bank.adapters, key=lambda one: one.version)
        first_columns = torch.tensor(bank.first_columns([*order, None]))
        assert not (first_columns % 2).any()  # pairs of columns are added up in one order
        for one, masked in zip([*order, None], bank.masked_columns(first_columns), strict=True):
            assert int((~masked).sum()) == (one.rank + one.rank % 2 if one else 0)
            for name, (down, up) in bank.layers.items():
                assert len(down) == len(up) < 2 * width
                got = (down @ x).masked_fill(masked[0], 0.0) @ up
                layer = one.layers.get(name) if one else None
                torch.testing.assert_close(got, torch.zeros(6) if layer is None else layer.lora_a @ x @ layer.lora_b)
