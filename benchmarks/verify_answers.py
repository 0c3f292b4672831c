"""`python -m benchmarks.verify_answers`: are recorded answers found again, and forged ones found out?

For a chat model, SmolLM2 with a template for tools, and for a tiny T5: a server with little memory records answers of
all kinds at 1, 8 and 32 streams, preempting some. Servers with other options of batch, cache and speculation verify
them; every answer must be equal. Then answers are forged, and each forgery must be found. With --isas, answers that one
instruction set gave in float32 and int8 are verified with the others of this CPU. The exit code is 0 if all is well.
"""

import argparse
import contextlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice, product
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.adapters import write_adapters
from benchmarks.random_models import TEXTS, Model
from benchmarks.serving import Server, running_server
from demo.fetch import ensure
from tgis.bench.workload import WORDS
from tgis.engines.kernels.cpu.library import ISAS, cpu_flags

Record = dict[str, Any]
Request = tuple[str, dict[str, Any]]

MODELS = "T5", "SmolLM2"
STREAMS = 1, 8, 32
TINY_T5 = {"vocab_size": 512, "d_model": 64, "d_kv": 48, "d_ff": 128, "num_hidden_layers": 2, "num_heads": 4}
TINY_T5 |= {"pad_token_id": 510, "decoder_start_token_id": 510, "eos_token_id": 511}  # no bytes of texts
TEMPLATE = Path("tests/golden/chat_templates/hermes.jinja").read_text()  # for tools
PROPERTIES = {"a": {"type": "integer"}, "b": {"enum": ["x", "yz"]}}
SCHEMA = {"type": "object", "properties": PROPERTIES, "required": ["a", "b"]}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
SAMPLED = {"temperature": 0.8, "top_p": 0.9}
GREEDY = {"temperature": 0.0}
PENALTIES = {"frequency_penalty": 0.5, "presence_penalty": 0.3, "repetition_penalty": 1.2}
COMPLETIONS: list[dict[str, Any]] = [
    GREEDY,
    GREEDY | {"logprobs": 3},
    SAMPLED | {"stream": True},
    {"temperature": 1.0, "seed": 7, "logprobs": 2, "n": 2},
    {"temperature": 1.2, "top_k": 20, "min_p": 0.02, "logit_bias": {"17": 4}, "bad_words": ["the"]},
    SAMPLED | PENALTIES,
    GREEDY | PENALTIES | {"logprobs": 1},
    SAMPLED | {"structured_outputs": {"json": SCHEMA}},
    GREEDY | {"structured_outputs": {"regex": "[a-z]{3,9}( [a-z]+){1,3}"}, "logprobs": 0},
    GREEDY | {"stop": ["e", "\n"], "min_tokens": 3},
    SAMPLED | {"stop": ["s", "t a"], "include_stop_str_in_output": True},
    SAMPLED | {"model": "soft-prompt", "logprobs": 0},
    *({**kind, "model": f"adapter-{number}", "logprobs": 0} for number in range(3) for kind in (GREEDY, SAMPLED)),
]
TGI: list[dict[str, Any]] = [{"typical_p": 0.5, "top_n_tokens": 2}, {"watermark": True, "stop": ["a"]}]
CHATS: list[dict[str, Any]] = [
    GREEDY | {"logprobs": True, "top_logprobs": 2},
    SAMPLED | {"tools": [TOOL], "tool_choice": "required"},
    GREEDY | {"tools": [TOOL], "stream": True},
    SAMPLED | {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
]
NUM_FORGERIES = 34  # of each kind, with two more kinds: 306
FORGERIES = "one token", "text", "temperature", "seed", "logprob", "reason", "other adapter"
KV_CACHE_MB = {"SmolLM2": 8, "T5": 5}  # for little more than the longest request, in 16 bits
LENGTHS = {"SmolLM2": "336", "T5": "900"}  # of which requests may be
OTHERS = (
    "--max-batch-size 5 --max-batch-prefill-tokens 48 --prefix-cache false --kv-cache-size-mb 64",
    "--speculation off --num-threads 1 --max-batch-size 16 --kv-cache-size-mb 256",
)


def new_request(draw: random.Random, has_chat: bool) -> Request:
    """A request of any kind; some prompts begin alike, some repeat themselves."""
    words = draw.choices(WORDS, k=draw.randint(3, 30))
    text = " ".join(draw.choice([words, [*WORDS[:40], *words], words * 4]))
    length = draw.randint(8, 20) * draw.choice((1, 3))
    fields = draw.choice([*COMPLETIONS, *TGI, *CHATS * has_chat])
    if fields in TGI:
        return "/generate", {"inputs": text, "parameters": fields | {"max_new_tokens": length, "details": True}}
    if fields in COMPLETIONS:
        return "/v1/completions", {"prompt": text, "max_tokens": length} | fields
    return "/v1/chat/completions", {"messages": [{"role": "user", "content": text}], "max_tokens": length} | fields


def post(server: Server, request: Request, draw: random.Random | None = None) -> None:
    """Get an answer; of some streams only the beginning."""
    path, body = request
    url, headers = f"http://127.0.0.1:{server.http_port}{path}", {"Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as answer:
        answer.read(2000 if body.get("stream") and draw and draw.random() < 0.3 else None)


def take(file: Path) -> list[Record]:
    """The records of a file, which is removed."""
    lines = file.read_bytes().splitlines()
    file.unlink()
    return [*map(json.loads, lines)]


def forge(kind: str, record: Record, draw: random.Random) -> Record | None:
    """The record with one thing changed; None if it does not have that."""
    record = json.loads(json.dumps(record))
    parameters, tokens, text = record["parameters"], record["output_ids"], record["text"]
    is_improbable = sum(details[0] for details in record.get("logprobs", [])) < -10  # so that other draws differ
    is_sampled = is_improbable and parameters.get("sampling", {}).get("temperature", 0) > 0.7
    match kind:
        case "one token":
            tokens[draw.randrange(len(tokens))] ^= 1
        case "text" if text:
            record["text"] = text.replace(draw.choice(text), "§", 1)
        case "temperature" if is_sampled:
            parameters["sampling"]["temperature"] = 0.2
        case "seed" if is_sampled:
            parameters["seed"] = parameters.get("seed", 0) + 1
        case "logprob" if "logprobs" in record:
            record["logprobs"][draw.randrange(len(tokens))][0] -= 1e-6
        case "reason" if record["stop_reason"] != "CANCELLED":
            record["stop_reason"] = "EOS_TOKEN" if record["stop_reason"] == "LENGTH" else "LENGTH"
        case "other adapter" if record.get("adapter", "").startswith("adapter"):
            record["adapter"] = f"adapter-{(int(record['adapter'][-1]) + 1) % 3}"
        case _:
            return None
    return record


def write_store(store: Path, model: Path, targets: tuple[str, ...], width: int, **fields: Any) -> None:
    """Adapters of odd and even ranks, and a soft prompt."""
    torch.manual_seed(1)
    store.mkdir()
    write_adapters(store, model, targets, [3, 8, 5])
    prompt = store / "soft-prompt"
    prompt.mkdir()
    (prompt / "adapter_config.json").write_text(json.dumps({"peft_type": "PROMPT_TUNING"} | fields))
    save_file({"prompt_embeddings": torch.randn(4, width) * 0.05}, prompt / "adapter_model.safetensors")


def make_models(cache: Path, scratch: Path) -> dict[str, tuple[Path, Path]]:
    """The directories of both models, and of their adapters."""
    chat = shutil.copytree(ensure("smollm2", cache.absolute()), scratch / "chat", copy_function=os.symlink)
    (chat / "chat_template.jinja").unlink()
    (chat / "chat_template.jinja").write_text(TEMPLATE)
    t5 = Model("T5", TINY_T5, TEXTS).make(cache)
    write_store(scratch / "chat-store", chat, ("layers.0.self_attn.q_proj", "layers.3.mlp.down_proj"), 576)
    write_store(scratch / "t5-store", t5, ("q", "wi", "wo"), 64, task_type="SEQ_2_SEQ_LM", num_virtual_tokens=2)
    return {"SmolLM2": (chat, scratch / "chat-store"), "T5": (t5, scratch / "t5-store")}


class Bench:
    """The models, and how they are served."""

    def __init__(self, cache: Path, scratch: Path) -> None:
        self._cache, self.file, self.models = cache, scratch / "records", make_models(cache, scratch)

    def serving(self, name: str, *options: str) -> contextlib.AbstractContextManager[Server]:
        model, store = self.models[name]
        limits = "--max-sequence-length", LENGTHS[name], "--max-new-tokens", "64"
        return running_server(model, self._cache, "--prefix-store-path", str(store), *limits, *options)

    def recorded(self, name: str, count: int, *options: str) -> list[Record]:
        """Answers, as many at each number of streams, of a server without the memory for all at a time."""
        size = "--kv-cache-size-mb", str(KV_CACHE_MB[name] * (2 if "float32" in options else 1))
        with self.serving(name, "--record-path", str(self.file), *size, *options) as server:
            draw, records = random.Random(1), list[Record]()
            for at, streams in enumerate(STREAMS, 1):
                with ThreadPoolExecutor(streams) as threads:
                    while len(records) < count * at // len(STREAMS):
                        requests = [new_request(draw, name == "SmolLM2") for _ in range(2 * streams)]
                        [*threads.map(lambda request: post(server, request, draw), requests)]
                        records += take(self.file)
                del records[count * at // len(STREAMS) :]
            preempted = re.search(r"^tgi_batch_preemption_total (\S+)", server.metrics(), re.MULTILINE)
        print(f"recorded {len(records)} answers, {preempted and preempted[1]} preemptions", flush=True)
        return records

    def chats(self, *options: str) -> list[Record]:
        """Answers to the same chats, in one order."""
        draw, fields = random.Random(3), GREEDY | {"max_tokens": 12, "logprobs": True}
        with self.serving("SmolLM2", "--record-path", str(self.file), *options) as server:
            for _ in range(NUM_FORGERIES):
                message = {"role": "user", "content": " ".join(draw.choices(WORDS, k=8))}
                post(server, ("/v1/chat/completions", fields | {"messages": [message]}))
        return take(self.file)

    def different(self, name: str, records: Sequence[Record], *options: str) -> set[int]:
        """The indices of the answers of a server that differ, as `tgis verify` says."""
        self.file.write_text("".join(f"{json.dumps(record)}\n" for record in records))
        with self.serving(name, *options) as server:
            command = [sys.executable, "-m", "tgis", "verify", str(self.file)]
            command += ["--target", f"127.0.0.1:{server.http_port}"]
            done = subprocess.run(command, check=False, capture_output=True, text=True)
        self.file.unlink()
        *differences, last = (done.stdout + done.stderr).splitlines()
        print(f"{name} {' '.join(options)}: {last}", *differences[:20], sep="\n  ", flush=True)
        assert "answers are equal" in last
        assert done.returncode == (1 if differences else 0)
        return {int(line.removeprefix(f"{self.file}:").partition(":")[0]) - 1 for line in differences}

    def forged(self, records: list[Record]) -> list[Record]:
        """Forgeries of each kind: such records changed, and answers of other weights and for another template."""
        draw, forged = random.Random(2), list[Record]()
        for kind in FORGERIES:
            candidates = (forge(kind, record, draw) for record in draw.sample(records, len(records)))
            forged += islice(filter(None, candidates), NUM_FORGERIES)
        right, template = self.chats(), self.models["SmolLM2"][0] / "chat_template.jinja"
        template.write_text(TEMPLATE.replace("\\n", "\\n\\n"))
        others = self.chats("--quantize", "int8")
        template.write_text(TEMPLATE)
        pairs = [*zip(right, others, strict=True)]
        forged += [other | {"fingerprint": record["fingerprint"]} for record, other in pairs]
        forged += [record | {"prompt_ids": other["prompt_ids"]} for record, other in pairs]
        return forged


def verify_all(bench: Bench, count: int) -> int:
    """The number of failures: answers that differ, and forgeries that do not."""
    failures = 0
    for name in MODELS:
        records = bench.recorded(name, count)
        failures += sum(len(bench.different(name, records, *options.split())) for options in OTHERS)
    forged = bench.forged(records)
    missed = {*range(len(forged))} - bench.different(name, forged)
    kinds = [*FORGERIES, "int8", "other template"]
    print(f"{len(missed)} of {len(forged)} forgeries missed: {[kinds[at // NUM_FORGERIES] for at in missed]}")
    return failures + len(missed)


def compare_isas(bench: Bench, count: int) -> int:
    """The number of answers that differ between instruction sets."""
    failures, isas = 0, [isa for isa in ISAS if isa.startswith("avx") and ISAS[isa] <= cpu_flags()]
    for name, quantize in product(MODELS, ("none", "int8")):
        records = list[Record]()
        for isa in isas:
            library = "AVX512" if isa.startswith("avx512") else "AVX2"
            os.environ |= {"ATEN_CPU_CAPABILITY": library.lower(), "MKL_ENABLE_INSTRUCTIONS": library}
            options = "--cpu-isa", isa, "--dtype", "float32", "--quantize", quantize
            if records:
                failures += len(bench.different(name, records, *options))
            else:
                records = bench.recorded(name, count, *options)
    return failures


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.verify_answers", description=__doc__)
    parser.add_argument("--isas", action="store_true", help="compare instruction sets instead")
    parser.add_argument("--answers", type=int, default=500, metavar="N", help="of each model")
    parser.add_argument("--cache", type=Path, default=Path(".cache"), metavar="DIR")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as scratch:
        bench = Bench(args.cache, Path(scratch))
        failures = (compare_isas if args.isas else verify_all)(bench, args.answers)
    print(f"{failures} failures")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
