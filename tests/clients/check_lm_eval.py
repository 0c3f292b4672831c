"""lm-eval in batches of eight against the server at SERVER_URL, whose engine repeats its prompt."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}

import lm_eval  # type: ignore[import-not-found]
from lm_eval import utils
from lm_eval.models.openai_completions import LocalCompletionsAPI  # type: ignore[import-not-found]

NUM_DOCS = 20


class ServerTokenizer(utils.RemoteTokenizer):  # type: ignore[misc]
    """The server's tokenizer, by `/tokenize` and `/detokenize` of vLLM."""

    tokenizer_info = {"eos_token": "</s>"}  # noqa: RUF012 - of the base class

    def _validate_server(self) -> None:
        pass


TASKS: dict[str, dict[str, Any]] = {
    "generation": {"output_type": "generate_until", "generation_kwargs": {"until": ["\n"], "max_gen_toks": 20}},
    "choice": {"output_type": "multiple_choice", "doc_to_choice": ["yes", "no"], "doc_to_target": 0},
}
METRICS = {"generation": ("exact_match,none", {1.0}), "choice": ("acc,none", {0.0, 1.0})}


@pytest.mark.parametrize("kind", TASKS)
def test_a_task(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(utils, "RemoteTokenizer", ServerTokenizer)
    docs = tmp_path / "docs.jsonl"
    docs.write_text("".join(json.dumps({"text": f"text {number}"}) + "\n" for number in range(NUM_DOCS)))
    task: dict[str, Any] = {"task": kind, "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(docs)}}}
    task |= {"test_split": "test", "doc_to_text": "{{text}}\n", "doc_to_target": "{{text}}", "target_delimiter": ""}
    url = f"{os.environ['SERVER_URL']}/v1/completions"
    model = LocalCompletionsAPI(url, "remote", model="any", batch_size=8, max_retries=1, num_concurrent=2)
    results = lm_eval.simple_evaluate(model, tasks=[task | TASKS[kind]], bootstrap_iters=0)
    metric, expected = METRICS[kind]
    assert results["results"][kind][metric] in expected
    assert len(results["samples"][kind]) == NUM_DOCS
