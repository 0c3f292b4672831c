"""A model over several processes on the CPU: what it computes, what it refuses, and what happens when one dies."""

import itertools
import os
import random
import socket
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any
from unittest import mock

import msgspec
import psutil  # type: ignore[import-untyped]
import pytest
import torch
import transformers
from batches import engine_options, limits
from hypothesis import given, settings
from hypothesis import strategies as st
from mlp_speculators import random_mlp, save_mlp
from proposers import Adversary, ForcedDrafts, proposing
from step_failures import Failing, check, requests
from step_failures import run as run_with_failures
from tiny_models import Outcome, make_model_from_config, outcomes
from transformers import AutoModelForCausalLM

from tgis.batcher.sequence import Sequence, StepPlan
from tgis.engines.base import Engine, StepResult
from tgis.engines.distributed import ranks
from tgis.engines.distributed.engine import Follower, ShardedEngine
from tgis.engines.distributed.mirror import MirroredSequences, SentSequences, StepInput
from tgis.engines.paged.engine import PagedEngine
from tgis.errors import StartError
from tgis.ipc.channel import encode_frame
from tgis.ipc.lookups import AdapterRef
from tgis.ipc.messages import EngineOptions, Fatal, Heartbeat
from tgis.ipc.request import LogprobOptions, Request, SamplingParams
from tgis.prompts.lora import LoraAdapter, LoraLayerWeights
from tgis.prompts.soft_prompt import SoftPrompt

NEW_TOKENS = 12
SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def options_of(model: Path, **changes: Any) -> EngineOptions:
    values: dict[str, Any] = {"engine": "tgis_native", "kv_cache_bytes": 1 << 20, "num_shards": 2}
    return engine_options(model, **values | changes)


@contextmanager
def sharded(model: Path, fail: Any = sys.exit, **changes: Any) -> Iterator[ShardedEngine]:
    cpus = os.sched_getaffinity(0)
    with mock.patch.object(ranks, "share_of_nodes", return_value={0: [min(cpus)]}):
        engine = ShardedEngine(options_of(model, **changes), fail, print)
    assert os.sched_getaffinity(0) == {min(cpus)}
    try:
        engine.warm_up()
        yield engine
    finally:
        engine.close()
    assert os.sched_getaffinity(0) == cpus


def small_llama(directory: Path) -> Path:
    """With random weights, large enough for clear choices, and with random biases everywhere."""
    config = transformers.LlamaConfig(**SMALL, attention_bias=True, mlp_bias=True, tie_word_embeddings=False)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, weight in model.named_parameters():
        if "norm" not in name:
            torch.nn.init.normal_(weight, std=0.2)
    model.save_pretrained(directory)
    return directory


def small_drafter(kind: str, model: Path) -> Path:
    """What drafts for this model."""
    directory = model / kind
    directory.mkdir()
    if kind == "an MLP":
        sizes = {"vocab_size": SMALL["vocab_size"], "emb_dim": SMALL["hidden_size"], "inner_dim": 40, "n_predict": 3}
        return save_mlp(directory, {"model_type": "mlp_speculator"} | sizes, random_mlp(sizes))
    config = transformers.FalconConfig(**SMALL, alibi=True)  # whose biases are by heads, of which ranks have a part
    return model if kind == "itself" else make_model_from_config(config, directory)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "speculation"), [(4, "off"), (2, "off"), (2, "lookup"), (2, "itself"), (2, "another")]
)
def test_ranks_compute_what_one_does(count: int, speculation: str, tmp_path: Path) -> None:
    model, changes = small_llama(tmp_path), {"num_shards": count, "speculation": speculation}
    if drafts := speculation not in ("off", "lookup"):
        changes |= {"speculation": "auto", "speculator_path": str(small_drafter(speculation, model))}
    expected = outputs_of_one(model)
    with sharded(model, **changes) as engine:
        counts = check_outputs(engine, expected, drafts=drafts)
    assert counts["kept"] == counts["drafted"] or speculation != "itself"


def wanted() -> list[Request]:
    rng = random.Random(1)
    prompts = [[rng.randrange(3, 96) for _ in range(rng.randint(1, 30))] for _ in range(5)]
    prompts.append(prompts[-1] + prompts[0])
    details = [LogprobOptions(generated_tokens=True, input_tokens=told, logprobs=True) for told in (False, True)]
    return [Request(n, prompt, NEW_TOKENS, False, SamplingParams(), details[n % 2]) for n, prompt in enumerate(prompts)]


def outputs_of_one(model: Path) -> dict[int, Outcome]:
    """Those of an engine without ranks."""
    engine = PagedEngine(options_of(model, num_shards=1))
    engine.warm_up()
    return run(engine)[0]


def check_outputs(engine: ShardedEngine, expected: dict[int, Outcome], *, drafts: bool) -> Counter[str]:
    """The same, in chunks, side by side, with cached prefixes, preempted rows, and proposals."""
    with proposing(ForcedDrafts if drafts else Adversary):
        outputs, counts = run(engine)
    assert (counts["drafted"] > 20) == drafts
    check(outputs, expected)
    return counts


def run(engine: Engine) -> tuple[dict[int, Outcome], Counter[str]]:
    paged: dict[str, Any] = {"padded": False, "block_size": 16, "prefix_cache": True, "prefill_tokens": 7}
    proposed = {"proposed_tokens": engine.info.proposed_tokens, "drafted_tokens": engine.info.drafted_tokens}
    bounds = limits(96, max_batch_size=4, vocab_size=96, **proposed, **paged)
    return outcomes(engine, bounds, wanted(), random.Random(1))


def drawn_adapter(data: st.DataObject, version: int, dtype: torch.dtype, length: int) -> tuple[AdapterRef | None, Any]:
    kind = data.draw(st.sampled_from(["none", "prompt", "lora"]))
    if kind == "lora":
        layer = LoraLayerWeights(torch.ones(2, 6), torch.ones(2, 6))
        return AdapterRef("l", 0, 0, 1, version, 2), LoraAdapter(version, {"q": layer})
    virtual = data.draw(st.integers(1, length))
    prompt = SoftPrompt(version, torch.randn((virtual, 6)).to(dtype))
    return (AdapterRef("p", virtual, 0, 1, version), prompt) if kind == "prompt" else (None, None)


@settings(max_examples=40)
@given(st.data())
def test_other_ranks_have_the_same_sequences(data: st.DataObject) -> None:
    """Over steps in which they get tokens and blocks, leave and come back."""
    rows = list[Sequence]()
    dtype = data.draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16]))
    for n in range(data.draw(st.integers(1, 5))):
        length = data.draw(st.integers(1, 40))
        details = LogprobOptions(input_tokens=data.draw(st.booleans()))
        known = [(row.request.adapter, row.adapter) for row in rows]  # sequences may share one
        reference, adapter = data.draw(st.sampled_from([drawn_adapter(data, n, dtype, length), *known]))
        rows.append(
            Sequence(Request(n, list(range(length)), 9, False, SamplingParams(), details, adapter=reference), 0.0)
        )
        rows[-1].adapter = adapter
    sent, mirrored = SentSequences(), MirroredSequences(torch.device("cpu"))
    for _ in range(4):
        chosen = [row for row in rows if data.draw(st.booleans())] or rows
        for row in chosen:
            if data.draw(st.booleans()):  # preempted
                sent.release([row])
                row.block_table, row.num_computed_tokens = [], 0
            row.tokens += [90] * data.draw(st.integers(0, 3))
            missing = -(-len(row.tokens) // 4) - len(row.block_table)
            row.block_table += [data.draw(st.integers(0, 30)) for _ in range(missing)]
            if data.draw(st.booleans()):
                row.block_table = [*reversed(row.block_table)]  # another list
            row.num_computed_tokens = data.draw(st.integers(0, len(row.tokens) - 1))
        plan = StepPlan.of(chosen, [data.draw(st.integers(1, row.num_uncomputed_tokens)) for row in chosen])
        message = msgspec.msgpack.decode(msgspec.msgpack.encode(sent.step_input(plan)), type=ranks.RankMessage)
        assert isinstance(message, StepInput)
        mirrored.pop(message.released)
        check_same(plan, mirrored.plan(message))


def check_same(plan: StepPlan, other: StepPlan) -> None:
    assert plan.has_prefill == other.has_prefill
    assert [seq.id for seq in plan.sampled] == [seq.id for seq in other.sampled]
    for row, same in zip(plan.seqs, other.seqs, strict=True):
        for name in ("id", "tokens", "block_table", "num_computed_tokens", "wants_prompt_logprobs"):
            assert getattr(row, name) == getattr(same, name), name
        assert type(row.adapter) is type(same.adapter)
        if isinstance(row.adapter, SoftPrompt):
            assert torch.equal(row.adapter.decoder, same.adapter.decoder)
        elif row.adapter:
            assert torch.equal(row.adapter.layers["q"].lora_b, same.adapter.layers["q"].lora_b)


def test_a_step_of_32_decodes_is_small_whatever_the_context() -> None:
    seqs = [Sequence(Request(1 << 30 | n, [1 << 17] * 100_000, 99), 0.0) for n in range(32)]
    for seq in seqs:
        seq.block_table = [1 << 20] * 6_300
    sent = SentSequences()
    sent.step_input(StepPlan.compute_all(seqs))
    for _ in range(20):
        for seq in seqs:
            seq.num_computed_tokens = len(seq.tokens)
            seq.tokens.append(1 << 17)
            seq.block_table.append(1 << 20)
        assert len(msgspec.msgpack.encode(sent.step_input(StepPlan.compute_all(seqs)))) < 2048


def test_two_ranks_compute_what_one_does_try_again_and_end_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], caplog: Any
) -> None:
    """Steps are tried again if rank 0 fails after the model, or all ranks alike; if they wait for rank 0, all end."""
    monkeypatch.setattr("tgis.engines.distributed.engine._CRASH_DETECTION_SECONDS", 1.0)
    monkeypatch.setattr("tgis.engines.distributed.engine._EXIT_SECONDS", 0.1)
    caplog.set_level("INFO")
    reasons = SimpleQueue[str]()

    def fail(reason: str) -> None:
        reasons.put(reason)
        if threading.current_thread() is threading.main_thread():
            sys.exit(reason)

    no_memory, model = torch.OutOfMemoryError("none left"), small_llama(tmp_path)
    drafter, of_one = small_drafter("an MLP", model), outputs_of_one(model)
    with sharded(model, fail, speculation="auto", speculator_path=str(drafter)) as engine:
        check_outputs(engine, of_one, drafts=True)
        rank_0, paged = engine._engine, {"padded": False, "block_size": 16, "prefill_tokens": 100}
        assert isinstance(rank_0, PagedEngine)
        bounds = limits(engine.info.token_capacity, **paged)
        expected = run_with_failures(engine, requests(), bounds)
        assert engine.clear_cache()
        check(run_with_failures(engine, requests(), bounds), expected)
        sampler = rank_0._sampler
        for error, calls in ((no_memory, {1, 6}), (RuntimeError("broken"), {2, 9})):
            with mock.patch.object(sampler, "sample", Failing(sampler.sample, error, calls)):
                check(run_with_failures(engine, requests(), bounds), expected)
        with mock.patch.object(engine, "step", broken(engine, {2, 7})):
            check(run_with_failures(engine, requests(), bounds), expected)
        forward = Failing(rank_0.runner.run, no_memory, {1})
        with mock.patch.object(rank_0.runner, "run", forward), pytest.raises(SystemExit, match="out of memory"):
            run_with_failures(engine, requests(), bounds)
        assert reasons.get(timeout=20).startswith("rank 0 of the engine failed in a step: OutOfMemory: ")
        (follower,) = engine._followers
        assert follower.process is not None
        follower.process.kill()
        assert reasons.get(timeout=20) == "rank 1 of the engine was ended by signal 9"
    assert f"loading {model} as float32 on cpu" in capfd.readouterr().out  # the log of the other rank
    assert {"2 ranks compute every step", "rank 0 failed in a step"} <= {*caplog.messages}


def broken(engine: ShardedEngine, calls: set[int]) -> Callable[[StepPlan], StepResult]:
    """Steps of which some have a sequence without blocks."""
    step, calls_made = engine.step, itertools.count()

    def broken_step(plan: StepPlan) -> StepResult:
        table = plan.seqs[0].block_table
        try:
            if next(calls_made) in calls:
                plan.seqs[0].block_table = []
            return step(plan)
        finally:
            plan.seqs[0].block_table = table

    return broken_step


def test_more_shards_than_gpus_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers.LlamaConfig(**SMALL).save_pretrained(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    ranks.check_shardable(options_of(tmp_path))
    with pytest.raises(StartError, match="NUM_SHARD=4 is more than the 3 GPUs"):
        ranks.check_shardable(options_of(tmp_path, num_shards=4))


@pytest.mark.parametrize(
    ("last", "said"), [([Fatal("has no memory")], "has no memory"), ([], "is gone: Connection reset by peer")]
)
def test_a_rank_of_another_node_hears_why_all_end_and_answers(last: list[Fatal], said: str) -> None:
    link, peer = socket.socketpair()
    with link, peer:
        other = Follower("rank 1", link, None, fail := mock.Mock(), forward := mock.Mock())
        other.send_reason("no memory")
        received = peer.recv(1000, socket.MSG_PEEK)  # closing resets the connection, since it is not read
        assert (received, link.gettimeout()) == (encode_frame(Fatal("no memory")), 0.1)
        for message in (Heartbeat(1, 7), ranks.GiveUp(), *last):
            peer.sendall(encode_frame(message))
        assert other.gave_up(20)
        assert not other.gave_up(0)
        peer.close()
        other._watcher.join(20)
    assert (forward.mock_calls, fail.mock_calls) == ([mock.call(Heartbeat(1, 7))], [mock.call(f"rank 1 {said}")])


@pytest.mark.parametrize(
    ("address", "interface"), [("fd00::2", "eth1"), ("::1", "lo"), ("fd00::3", None), ("127.0.0.1", "lo")]
)
def test_collectives_use_the_interface_of_an_address(
    address: str, interface: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = tmp_path / "if_inet6"
    listed.write_text("fe80" + "0" * 27 + "1 04 40 20 80     eth0\nfd00" + "0" * 27 + "2 04 40 00 82     eth1\n")
    monkeypatch.setattr(ranks, "_IPV6_ADDRESSES", listed)
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(variable, raising=False)
    ranks.use_interface(None, address)
    assert os.environ.get("GLOO_SOCKET_IFNAME") == os.environ.get("NCCL_SOCKET_IFNAME") == interface


def test_collectives_use_the_interface_that_has_an_address_of_this_machine() -> None:
    for name, addresses in psutil.net_if_addrs().items():
        for address in addresses:
            if address.family is socket.AF_INET:
                ranks.use_interface(None, address.address)
                assert os.environ["GLOO_SOCKET_IFNAME"] == os.environ["NCCL_SOCKET_IFNAME"] == name
