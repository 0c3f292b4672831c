"""`python -m benchmarks.verify_answers`: are recorded answers found again, and forged ones found out?

For a chat model, SmolLM2 with a template for tools, and for a tiny T5: a server with little memory records answers of
all kinds at 1, 8 and 32 streams, preempting some. Servers with other options of batch, cache and speculation verify
them; every answer must be equal. Then answers are forged, and each forgery must be found. With --isas, answers that one
instruction set gave in float32 and int8 are verified with the others of this CPU. The exit code is 0 if all is well.
"""

import argparse
import contextlib
import copy
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

STREAMS = 1, 8, 32
TINY_T5 = {"vocab_size": 512, "d_model": 64, "d_kv": 48, "d_ff": 128, "num_hidden_layers": 2, "num_heads": 4}
TINY_T5 |= {"pad_token_id": 510, "decoder_start_token_id": 510, "eos_token_id": 511}  # no bytes of texts
TEMPLATE = """{%- macro part(role, text) %}{{ '<|im_start|>' + role + '\\n' + text + '<|im_end|>\\n' }}{% endmacro %}
{%- if tools %}{{ part('system', tools | tojson + '<tool_call></tool_call>') }}{% endif %}
{%- for message in messages %}{{ part(message.role, message.content) }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
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
    GREEDY | {"model": "soft-prompt", "logprobs": 0},
    SAMPLED | {"model": "soft-prompt"},
    *({**kind, "model": f"adapter-{number}", "logprobs": 0} for number in range(3) for kind in (GREEDY, SAMPLED)),
]
TGI: list[dict[str, Any]] = [{"typical_p": 0.5, "top_n_tokens": 2}, {"watermark": True, "stop": ["a"]}]
CHATS: list[dict[str, Any]] = [
    GREEDY | {"logprobs": True, "top_logprobs": 2},
    SAMPLED | {"tools": [TOOL], "tool_choice": "required"},
    GREEDY | {"tools": [TOOL], "stream": True},
    SAMPLED | {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
]
FORGERIES = "one token", "text", "temperature", "seed", "logprob", "reason", "other adapter"
KV_NUMBERS, KV_TOKENS = 384, 960  # of a layer of SmolLM2, and of the smallest cache
LIMITS = "--max-sequence-length", "900", "--max-new-tokens", "64"
OTHERS = (
    "--max-batch-size 5 --max-batch-prefill-tokens 48 --prefix-cache false --kv-cache-size-mb 64",
    "--speculation off --num-threads 1 --max-batch-size 16 --kv-cache-size-mb 256",
)


def new_request(draw: random.Random, has_chat: bool) -> Request:
    """A request of any kind; some prompts begin alike, some repeat themselves."""
    words = draw.choices(WORDS, k=draw.randint(3, 30))
    text = " ".join(draw.choice([words, [*WORDS[:40], *words], words * 4]))
    length = draw.randint(8, 20) * (1 if has_chat else 3)
    fields = draw.choice([*COMPLETIONS, *TGI, *CHATS * has_chat])
    if fields in TGI:
        return "/generate", {"inputs": text, "parameters": fields | {"max_new_tokens": length, "details": True}}
    if fields in COMPLETIONS:
        return "/v1/completions", {"prompt": text, "max_tokens": length} | fields
    return chat(text, fields | {"max_tokens": length})


def chat(text: str, fields: dict[str, Any]) -> Request:
    return "/v1/chat/completions", {"messages": [{"role": "user", "content": text}]} | fields


def post(server: Server, request: Request, draw: random.Random | None = None) -> None:
    """Get an answer; of some streams only the beginning."""
    path, body = request
    headers = {"Content-Type": "application/json"}
    url = f"http://127.0.0.1:{server.http_port}{path}"
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as answer:
        answer.read(2000 if body.get("stream") and draw and draw.random() < 0.3 else None)


def take(file: Path) -> list[Record]:
    """The records of a file, which is removed."""
    lines = file.read_bytes().splitlines()
    file.unlink()
    return [*map(json.loads, lines)]


def record(server: Server, file: Path, count: int, has_chat: bool) -> list[Record]:
    """Answers, as many at each number of streams."""
    draw, records = random.Random(1), list[Record]()
    for at, streams in enumerate(STREAMS, 1):
        with ThreadPoolExecutor(streams) as threads:
            while len(records) < count * at // len(STREAMS):
                requests = [new_request(draw, has_chat) for _ in range(2 * streams)]
                [*threads.map(lambda request: post(server, request, draw), requests)]
                records += take(file)
        del records[count * at // len(STREAMS) :]
    preempted = re.search(r"^tgi_batch_preemption_total (\S+)", server.metrics(), re.MULTILINE)
    print(f"  recorded {len(records)} answers, {preempted and preempted[1]} preemptions", flush=True)
    return records


def verify(server: Server, records: Sequence[Record], *options: str) -> list[str]:
    """What `tgis verify` prints."""
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
        file.writelines(f"{json.dumps(record)}\n" for record in records)
        file.flush()
        target = "--target", f"127.0.0.1:{server.http_port}"
        command = [sys.executable, "-m", "tgis", "verify", file.name, *target, *options]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
    lines = (done.stdout + done.stderr).splitlines()
    assert (done.returncode == 0) == (lines[-1] == f"{len(records)} of {len(records)} answers are equal"), lines[-1]
    return lines


def can_forge(kind: str, record: Record) -> bool:
    """Whether a record has what this kind of forgery changes."""
    parameters, sampling = record["parameters"], record["parameters"].get("sampling", {})
    if kind in ("temperature", "seed"):  # enough tokens, drawn freely, that no other draws give the same
        is_free = parameters.keys().isdisjoint({"grammar", "stop_sequences"})
        return is_free and len(record["output_ids"]) > 11 and sampling.get("temperature", 0) > 0.7
    fields = {"one token": "output_ids", "text": "text", "logprob": "logprobs", "other adapter": "adapter"}
    if kind == "reason":
        return bool(record["stop_reason"] != "CANCELLED")
    return bool(record.get(fields[kind])) and record.get("adapter") != "soft-prompt"


def forge(kind: str, record: Record, draw: random.Random) -> Record:
    """The record with one thing changed."""
    record = copy.deepcopy(record)
    parameters, tokens, text = record["parameters"], record["output_ids"], record["text"]
    match kind:
        case "one token":
            tokens[draw.randrange(len(tokens))] ^= 1
        case "text":
            at = draw.randrange(len(text))
            record["text"] = f"{text[:at]}§{text[at + 1 :]}"
        case "temperature":
            parameters["sampling"]["temperature"] = 0.2
        case "seed":
            parameters["seed"] = parameters.get("seed", 0) + 1
        case "logprob":
            record["logprobs"][draw.randrange(len(tokens))][0] -= 1e-6
        case "reason":
            record["stop_reason"] = "EOS_TOKEN" if record["stop_reason"] == "LENGTH" else "LENGTH"
        case "other adapter":
            record["adapter"] = f"adapter-{(int(record['adapter'][-1]) + 1) % 3}"
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


def make_models(cache: Path, scratch: Path, layers: int | None) -> dict[str, tuple[Path, Path]]:
    """The directories of both models, and of their adapters."""
    chat = shutil.copytree(ensure("smollm2", cache.absolute()), scratch / "chat", copy_function=os.symlink)
    config = json.loads((chat / "config.json").read_text()) | ({"num_hidden_layers": layers} if layers else {})
    for name, text in {"config.json": json.dumps(config), "chat_template.jinja": TEMPLATE}.items():
        (chat / name).unlink()
        (chat / name).write_text(text)
    t5 = Model("T5", TINY_T5, TEXTS).make(cache)
    write_store(scratch / "chat-store", chat, ("layers.0.self_attn.q_proj", "layers.3.mlp.down_proj"), 576)
    write_store(scratch / "t5-store", t5, ("q", "wi", "wo"), 64, task_type="SEQ_2_SEQ_LM", num_virtual_tokens=2)
    return {"SmolLM2": (chat, scratch / "chat-store"), "tiny T5": (t5, scratch / "t5-store")}


class Bench:
    """The models, and how they are served."""

    def __init__(self, cache: Path, scratch: Path, layers: int | None) -> None:
        self._cache, self.file, self.models = cache, scratch / "records", make_models(cache, scratch, layers)

    def serving(self, name: str, *options: str) -> contextlib.AbstractContextManager[Server]:
        model, store = self.models[name]
        return running_server(model, self._cache, "--prefix-store-path", str(store), *LIMITS, *options)

    def recorded(self, name: str, count: int, *options: str) -> list[Record]:
        """Answers of a server without the memory for all requests at a time."""
        config = json.loads((self.models[name][0] / "config.json").read_text())
        tokens = KV_TOKENS * (2 if "float32" in options else 1)  # of 16 bits
        megabytes = 1 + tokens * config["num_hidden_layers"] * KV_NUMBERS * 2 // 2**20
        size = "--kv-cache-size-mb", str(megabytes)
        with self.serving(name, "--record-path", str(self.file), *size, *options) as server:
            return record(server, self.file, count, has_chat=name == "SmolLM2")

    def chats(self, count: int, *options: str) -> list[Record]:
        """Answers to the same chats, in one order."""
        draw, fields = random.Random(3), GREEDY | {"max_tokens": 12, "logprobs": True}
        with self.serving("SmolLM2", "--record-path", str(self.file), *options) as server:
            for _ in range(count):
                post(server, chat(" ".join(draw.choices(WORDS, k=8)), fields))
        return take(self.file)

    def forged(self, records: list[Record], each: int) -> list[Record]:
        """Forgeries of each kind: such records changed, and answers of other weights and for another template."""
        draw, forged = random.Random(2), list[Record]()
        for kind in FORGERIES:
            some = draw.sample([record for record in records if can_forge(kind, record)], each)
            forged += [forge(kind, record, draw) for record in some]
        right = self.chats(each)
        template = self.models["SmolLM2"][0] / "chat_template.jinja"
        template.write_text(TEMPLATE.replace("\\n", "\\n\\n"))
        others = self.chats(each, "--quantize", "int8")
        template.write_text(TEMPLATE)
        pairs = [*zip(right, others, strict=True)]
        forged += [other | {"fingerprint": record["fingerprint"]} for record, other in pairs]
        forged += [record | {"prompt_ids": other["prompt_ids"]} for record, other in pairs]
        assert all(record["fingerprint"] != other["fingerprint"] for record, other in pairs)
        return forged


def verify_all(bench: Bench, counts: dict[str, int], each: int) -> int:
    """The number of failures: answers that differ, and forgeries that do not."""
    failures = 0
    for name, count in counts.items():
        print(name)
        records = bench.recorded(name, count)
        for options in OTHERS:
            with bench.serving(name, *options.split()) as server:
                lines = verify(server, records)
                print(*lines, sep="\n  ", flush=True)
                failures += len(lines) - 1
        if name == "SmolLM2":
            forged = bench.forged(records, each)
            with bench.serving(name) as server:
                *differences, last = verify(server, forged)
            failures += len(forged) - len(differences)
            print(f"{len(differences)} of {len(forged)} forgeries found; {last}")
    return failures


def compare_isas(bench: Bench, counts: dict[str, int]) -> int:
    """The number of answers that differ between instruction sets."""
    failures, isas = 0, [isa for isa in ISAS if isa.startswith("avx") and ISAS[isa] <= cpu_flags()]
    for name, count in counts.items():
        for quantize in ("none", "int8"):
            records = list[Record]()
            for isa in isas:
                library = "AVX512" if isa.startswith("avx512") else "AVX2"
                os.environ |= {"ATEN_CPU_CAPABILITY": library.lower(), "MKL_ENABLE_INSTRUCTIONS": library}
                options = "--cpu-isa", isa, "--dtype", "float32", "--quantize", quantize
                if not records:
                    records = bench.recorded(name, count, *options)
                    continue
                with bench.serving(name, *options) as server:
                    lines = verify(server, records)
                failures += len(lines) - 1
                print(f"{name}, {quantize}, {isa}:", *lines, sep="\n  ", flush=True)
    return failures


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.verify_answers", description=__doc__)
    parser.add_argument("--isas", action="store_true", help="compare instruction sets instead")
    parser.add_argument("--answers", type=int, default=1000, metavar="N", help="one in five of T5")
    parser.add_argument("--forgeries", type=int, default=300, metavar="N")
    parser.add_argument("--layers", type=int, metavar="N", help="only the first of SmolLM2, which takes less time")
    parser.add_argument("--cache", type=Path, default=Path(".cache"), metavar="DIR")
    args = parser.parse_args(argv)
    counts = {"tiny T5": args.answers // 5, "SmolLM2": args.answers - args.answers // 5}
    with tempfile.TemporaryDirectory() as scratch:
        bench = Bench(args.cache, Path(scratch), args.layers)
        failures = compare_isas(bench, counts) if args.isas else verify_all(bench, counts, -(-args.forgeries // 9))
    print(f"{failures} failures")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
