"""An engine in process under a closed loop: the worker of `benchmarks.peer_process`, run by the Python of each engine.

`peer_engine.py openvino MODEL` needs only openvino-genai and a GGUF file in F16 or an IR; `peer_engine.py ctranslate2
MODEL THREADS` only ctranslate2, and a model by `benchmarks/convert_to_ctranslate2.py`; `peer_engine.py tgis CHECKOUT
OPTION...` is the engine of `tgis serve OPTION...`, with the batcher and without front end. It prints "ready" once it
is; then each line of JSON that it reads is a load, and each that it writes is what was measured, with times in seconds
after the start of the load.
"""

import argparse
import gc
import json
import os
import sys
import time
from collections.abc import Iterator
from typing import Any, Protocol

NewTokens = Iterator[tuple[int, list[int]]]  # request, tokens of the step


class Engine(Protocol):
    """An engine that computes one step at a time for all its requests."""

    def add(self, request: int, tokens: list[int], output_tokens: int) -> None: ...

    def step(self) -> NewTokens: ...


class OpenVino:
    """ContinuousBatchingPipeline in bfloat16; everything but the prefix cache is its default, the KV cache's u8 too."""

    def __init__(self, model: str) -> None:
        import openvino_genai  # type: ignore[import-not-found]  # noqa: PLC0415 - only in its own environment

        scheduler = openvino_genai.SchedulerConfig()
        scheduler.enable_prefix_caching = True
        scheduler.cache_size = 2  # GB, at most
        properties = {"INFERENCE_PRECISION_HINT": "bf16"}
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties)
        self._config = openvino_genai.GenerationConfig
        self._handles: dict[int, Any] = {}

    def add(self, request: int, tokens: list[int], output_tokens: int) -> None:
        import numpy as np  # noqa: PLC0415
        import openvino  # type: ignore[import-not-found]  # noqa: PLC0415

        config = self._config()
        config.max_new_tokens, config.ignore_eos, config.do_sample = output_tokens, True, False
        ids = openvino.Tensor(np.array([tokens], dtype=np.int64))
        self._handles[request] = self._pipeline.add_request(request, ids, config)

    def step(self) -> NewTokens:
        self._pipeline.step()
        for request, handle in [*self._handles.items()]:
            if handle.can_read():
                (output,) = handle.read().values()
                yield request, output.generated_ids
                if output.finish_reason.name != "NONE":
                    del self._handles[request]


class CTranslate2:
    """A Translator, greedy: a step is one call with all requests that wait. Tokens are numbers in its vocabulary."""

    def __init__(self, model: str, threads: str) -> None:
        import ctranslate2  # type: ignore[import-not-found]  # noqa: PLC0415 - only in its own environment

        self._translator = ctranslate2.Translator(model, inter_threads=1, intra_threads=int(threads))
        self._waiting: list[tuple[int, list[str], int]] = []

    def add(self, request: int, tokens: list[int], output_tokens: int) -> None:
        self._waiting.append((request, [str(token) for token in tokens], output_tokens))

    def step(self) -> NewTokens:
        requests, inputs, lengths = zip(*self._waiting, strict=True)
        (length,) = set(lengths)
        exact = {"min_decoding_length": length, "max_decoding_length": length}
        self._waiting = []
        results = self._translator.translate_batch([*inputs], beam_size=1, **exact)
        for request, result in zip(requests, results, strict=True):
            yield request, [int(token) for token in result.hypotheses[0]]


class Tgis:
    """The engine of a server with these options, and its batcher."""

    def __init__(self, options: list[str]) -> None:
        from tgis.config import parse  # noqa: PLC0415 - not in a peer's environment
        from tgis.environment import prepare_environment  # noqa: PLC0415

        config = parse(options, os.environ, "tgis serve")
        prepare_environment(config)  # before torch is imported
        from tgis.batcher.batcher import Batcher  # noqa: PLC0415
        from tgis.engine_core.main import batch_limits  # noqa: PLC0415
        from tgis.engines import load_engine  # noqa: PLC0415
        from tgis.errors import StartError  # noqa: PLC0415
        from tgis.ipc.request import Request, SamplingParams  # noqa: PLC0415
        from tgis.prepare import prepare  # noqa: PLC0415

        options_of_engine = prepare(config).engine_options()
        try:
            self._engine, _ = load_engine(options_of_engine, sys.exit, lambda _: None)
        except StartError as error:
            sys.exit(str(error))
        self._engine.warm_up()
        limits = batch_limits(options_of_engine, self._engine.info)
        self._batcher = Batcher(limits, options_of_engine.eos_ids)
        self._request, self._sampling = Request, SamplingParams

    def add(self, request: int, tokens: list[int], output_tokens: int) -> None:
        sampling = self._sampling(min_new_tokens=output_tokens)
        self._batcher.submit(
            [self._request(request, tokens, output_tokens, sampling_params=sampling)], time.monotonic()
        )

    def step(self) -> NewTokens:
        plan = self._batcher.plan(time.monotonic())
        self._engine.release(plan.to_release)
        result = self._engine.step(plan)
        assert not result.failed, result.failed
        self._batcher.commit(plan, result.tokens, time.monotonic())
        yield from ((seq.id, tokens) for seq, tokens in zip(plan.sampled, result.tokens, strict=True))


def run_load(engine: Engine, first_id: int, load: dict[str, Any]) -> dict[str, Any]:
    """Keep `streams` requests in flight until every prompt has got its tokens."""
    prompts, wanted = load["prompts"], load["output_tokens"]
    outputs: list[list[int]] = [[] for _ in prompts]
    requests: list[dict[str, Any]] = []
    started, cpu = time.perf_counter(), time.process_time()

    def add_next() -> None:
        if (number := len(requests)) < len(prompts):
            requests.append({"scheduled_at": time.perf_counter() - started, "max_gap": 0.0})
            engine.add(first_id + number, prompts[number], wanted)

    for _ in range(load["streams"]):
        add_next()
    while any(len(output) < wanted for output in outputs):
        for request, tokens in engine.step():
            number, now = request - first_id, time.perf_counter() - started
            record, output = requests[number], outputs[number]
            if not output:
                record |= {"first_output_at": now, "first_message_tokens": len(tokens), "last_output_at": now}
            record["max_gap"] = max(record["max_gap"], now - record["last_output_at"])
            record["last_output_at"] = record["ended_at"] = now
            output += tokens
            if len(output) == wanted:
                add_next()
    return {"requests": requests, "outputs": outputs, "cpu_seconds": time.process_time() - cpu}


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", choices=("ctranslate2", "openvino", "tgis"))
    parser.add_argument("given", nargs=argparse.REMAINDER, metavar="MODEL... or CHECKOUT OPTION...")
    args = parser.parse_args(arguments)
    engine: Engine
    if args.engine == "tgis":
        sys.path[0] = args.given[0]  # not the folder of this file
        engine = Tgis(args.given[1:])
    else:
        engine = {"ctranslate2": CTranslate2, "openvino": OpenVino}[args.engine](*args.given)
    gc.freeze()
    print("ready", flush=True)
    first_id = 1
    for line in sys.stdin:
        load = json.loads(line)
        print(json.dumps(run_load(engine, first_id, load)), flush=True)
        first_id += len(load["prompts"])


if __name__ == "__main__":
    main(sys.argv[1:])
