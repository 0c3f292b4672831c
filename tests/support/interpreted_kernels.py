"""Triton's kernels in its interpreter: `TRITON_INTERPRET=1 python interpreted_kernels.py KIND...`, or `KIND+` for the
cases that take longer than they are worth in every run.

A process of its own, since Triton decides at import whether to interpret. It prints one line of JSON: for each kind and
case how far the kernel's result is from the expected one. Triton cannot interpret bfloat16.
"""

import json
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import decode_cases
import filtered_cases
import gumbel_max_cases
import prefill_cases
import quantized_cases
import step_kernel_cases
import torch
from quantized_formats import FORMATS, load, quantized_copy
from tiny_models import make_model
from triton.runtime import interpreter

from tgis.engines.kernels.cuda.paged_decode import paged_decode
from tgis.engines.kernels.cuda.quantized import DeviceGemms
from tgis.engines.kernels.cuda.sampling import gumbel_max
from tgis.engines.loading import loader

IDS = torch.tensor([[5, 9, 13, 7, 40]])
CORNERS = {
    "one token",
    "of every length around a block and a tile",
    "only empty sequences",
    "a long sequence among short ones",
    "one KV head for all, in parts",
    "window, in splits",
    "bias by key, in splits",
    "all at once",
    "head size 96, int32, float16",
    "values wider than keys",
    "prompts",
    "chunks with context",
    "window of one token",
    "not causal, all at once",
    "one KV head, of 256",
    # filtered draws
    "top_k and top_p",
    "a list too short for top_p",
    "a list too short for those that tie",
    "the whole vocabulary",
    "no power of two",
    "the lowest temperature",
    "excluded tokens",
    "more than a list can have",
    "all equal",
    "no number",
}


def repair() -> None:
    """Triton 3.6 converts arrays of one element to int, which numpy has refused since 2.4; 3.7 does not."""
    patch = interpreter._patch_lang_tensor

    def repaired(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = repaired


def decode_error(case: decode_cases.Case) -> float:
    return decode_cases.error(case, "cpu", paged_decode, num_sms=case.num_sms)


def changed_draws(case: gumbel_max_cases.Case) -> float:
    return gumbel_max_cases.changed(replace(case, rows=min(case.rows, 5)), gumbel_max, "cpu")


def changed_filtered_draws(case: filtered_cases.Case) -> float:
    return filtered_cases.changed(case, "cpu")


def quantized_error(case: quantized_cases.Case) -> float:
    return quantized_cases.error(case, "cpu", torch.float32)


@torch.no_grad()  # type: ignore[untyped-decorator]
def model_error(name: str) -> float:
    """Of the logits of a Llama that is loaded as for a GPU."""
    as_on_gpus: dict[str, Any] = {
        "select_kernels": lambda *_: None,
        "GemmSelector": lambda _, how: DeviceGemms(how, IDS.device),
    }
    with tempfile.TemporaryDirectory() as directory:
        path = make_model("Llama", Path(directory))
        if name in FORMATS:
            config, quantize = FORMATS[name]
            expected, options = quantized_copy(path, quantize, config).double(), {}
        else:
            options = {"quantize": name, "quantize_logits": True}
            expected = load(path, **options)
        with mock.patch.multiple(loader, **as_on_gpus):
            model = load(path, **options)
    assert str(model.lm_head).startswith("PackedLinear") == (name not in FORMATS)
    logits = expected(IDS).logits
    return float((model(IDS).logits - logits).norm() / logits.norm())


def corners(cases: Mapping[str, Any]) -> dict[str, Any]:
    return {name: case for name, case in cases.items() if name in CORNERS}


def others(cases: Mapping[str, Any]) -> dict[str, Any]:
    return {name: case for name, case in cases.items() if name not in CORNERS}


def prefill_error(case: prefill_cases.Case) -> float:
    return prefill_cases.error(case, "cpu")


def each(cases: Mapping[str, Any], off: Callable[[Any], float]) -> dict[str, float]:
    return {name: off(case) for name, case in cases.items() if name != "bfloat16"}


KINDS: dict[str, Callable[[], Mapping[str, float]]] = {
    "decode": lambda: each(corners(decode_cases.CASES), decode_error),
    "decode+": lambda: each(others(decode_cases.CASES), decode_error),
    "prefill": lambda: each(corners(prefill_cases.CASES), prefill_error),
    "prefill+": lambda: each(others(prefill_cases.CASES), prefill_error),
    "draw": lambda: each(gumbel_max_cases.CASES, changed_draws),
    "filtered": lambda: each(corners(filtered_cases.CASES), changed_filtered_draws),
    "filtered+": lambda: each(others(filtered_cases.CASES), changed_filtered_draws),
    "quantized": lambda: each(quantized_cases.CASES, quantized_error),
    "models": lambda: {name: model_error(name) for name in ("int4", "gptq, act-order")},
    "compiled": lambda: quantized_cases.compiled("cpu"),
    "step": lambda: step_kernel_cases.errors("cpu", [torch.float32, torch.float16]),
}


def main() -> None:
    repair()
    print(json.dumps({kind: KINDS[kind]() for kind in sys.argv[1:]}))


if __name__ == "__main__":
    main()
