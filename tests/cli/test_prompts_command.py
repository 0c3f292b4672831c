"""`tgis prompts check`: its table and exit code."""

import json
import re
from pathlib import Path

import pytest
from lora_files import lora
from prompt_files import BIN, BROKEN, DECODER, ENCODER, KEY, matrix, peft, pt, tgis, write

from tgis import __main__


@pytest.fixture
def store(tmp_path: Path) -> Path:
    root = tmp_path / "store"
    write(root / "plain", tgis(matrix()))
    write(root / "team" / "tuned-8", peft({KEY: matrix(8)}))
    write(root / "team" / "half", {BIN: pt({KEY: matrix(6).half()})})
    write(root / "both", {DECODER: pt(matrix(8)), ENCODER: pt(matrix(5))})
    write(root / "low-rank", lora())
    write(root / ".git", tgis(matrix()))
    (root / "alias").symlink_to(root / "plain")
    return root


def check(path: Path, *argv: str) -> int:
    return __main__.run(["prompts", "check", str(path), *argv])


def test_a_good_store(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(store) == 0
    assert capsys.readouterr().out == (
        "alias         ok: soft prompt, 4 tokens\n"
        "both          ok: soft prompt, 13 tokens\n"
        "low-rank      ok: LoRA, rank 4\n"
        "plain         ok: soft prompt, 4 tokens\n"
        "team/half     ok: soft prompt, 6 tokens\n"
        "team/tuned-8  ok: soft prompt, 8 tokens\n"
        "\n"
        "6 good, 6 KiB in memory; 0 with a problem\n"
    )


def test_every_problem_is_reported(store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Including those that a server would only report as not found."""
    write(store, tgis(matrix()))
    write(store / "ia3", peft({"ia3": matrix()}, peft_type="IA3"))
    write(store / "dora", lora(use_dora=True))
    write(store / "other", {"README": b"hello"})
    write(store / "nothing", {})
    write(store / "dotted.name", tgis(matrix()))
    write(store / "strange\x1b[2J", tgis(matrix()))
    write(tmp_path / "secret", tgis(matrix()))
    (store / "out").symlink_to(tmp_path / "secret")
    for name in ("NaN", "a vector", "garbage", "a config too deep"):
        write(store / "broken" / name.replace(" ", "_"), BROKEN[name][0])
    assert check(store) == 1
    lines = capsys.readouterr().out.splitlines()
    states = {line.split("  ")[0]: re.sub("^ok: .*", "ok", line.rpartition("  ")[2]) for line in lines[:-2]}
    bad_id = "the id must contain only letters, digits, _ and - and /, 512 characters at most"
    for name, problem in {
        ".": "files directly in the store cannot be named",
        "ia3": "adapter type IA3 is not supported",
        "dora": "adapter_config.json has use_dora, which is not supported",
        "other": "invalid adapter: no adapter_config.json found",
        "nothing": "invalid adapter: no adapter_config.json found",
        "dotted.name": bad_id,
        r"strange\x1b[2J": bad_id,
        "out": "the id leads out of the store",
        "plain": "ok",
    }.items():
        assert states.pop(name) == problem
    for name in ("NaN", "a vector", "garbage", "a config too deep"):
        assert BROKEN[name][1] in states.pop(f"broken/{name.replace(' ', '_')}")
    assert set(states.values()) == {"ok"}
    assert lines[-1] == "6 good, 6 KiB in memory; 12 with a problem"


@pytest.mark.parametrize(
    ("config", "argv", "problem"),
    [
        ({"hidden_size": 32, "word_embed_proj_dim": 16}, [], None),
        ({"text_config": {"n_embd": 16}}, [], None),
        ({"hidden_size": 32}, [], "decoder.pt has rows of 16 numbers, the model's embeddings have 32"),
        ({"hidden_size": 16, "n_positions": 6}, [], "decoder.pt has 4 virtual tokens, from 1 to 3 are allowed"),
        ({"hidden_size": 16}, ["--max-length", "3"], "decoder.pt has 4 virtual tokens, from 1 to 3 are allowed"),
    ],
)
def test_the_model_decides_what_fits(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    config: dict[str, object],
    argv: list[str],
    problem: str | None,
) -> None:
    write(tmp_path / "model", {"config.json": json.dumps(config).encode()})
    write(tmp_path / "store" / "a", tgis(matrix()))
    assert check(tmp_path / "store", "--model", str(tmp_path / "model"), *argv) == bool(problem)
    assert capsys.readouterr().out.startswith(f"a  {problem or 'ok'}")


def test_a_usage_error_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(tmp_path / "absent") == 2
    assert check(tmp_path, "--dtype", "int8") == 2
    assert check(tmp_path, "--model", str(tmp_path)) == 1
    assert __main__.run(["prompts"]) == 2
    assert capsys.readouterr().err == (
        f"tgis: {tmp_path}/absent is not a directory\n"
        "tgis: argument --dtype: 'int8' must be one of float32, float16, bfloat16 (see tgis prompts --help)\n"
        f"tgis: {tmp_path} has no config.json\n"
        "tgis: the following arguments are required: check, PATH (see tgis prompts --help)\n"
    )
