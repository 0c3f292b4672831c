"""The fingerprint of a server: all that decides answers, and nothing else."""

from dataclasses import replace
from pathlib import Path

import pytest
from config_parsing import read
from engine_clients import INFO
from harness import run_async
from msgspec.structs import replace as replace_fields

from demo.fake_model import make_fake_model
from tgis.prepare import Preparation, prepare

HEADER = b'{"x": {"data_offsets": [0, 5]}}'
TEXTS = ("added_tokens.json", "chat_template.jinja", "chat_template.json", "special_tokens_map.json")
SETTINGS = {"model/config.json", "model/generation_config.json", "texts/tokenizer.json", "texts/tokenizer_config.json"}
SETTINGS |= {f"texts/{name}" for name in TEXTS}
OTHERS = {"model/README.md", "model/tokenizer.json", "texts/config.json"}
WEIGHTS = {"fake": [], "tgis_native": ["model/model.safetensors"], "hf_optimum_ort": ["model/graphs/decoder.onnx"]}


async def fingerprint(made: Preparation, engine: str, *, special: bool = True, **info: str | bool) -> str:
    config = replace(made.config, deployment_framework=engine, add_special_tokens=special)
    preparation = replace(made, config=config)
    return preparation.with_fingerprint(replace_fields(INFO, **info), await preparation.file_digest()).fingerprint


@pytest.mark.parametrize("engine", WEIGHTS)
@run_async
async def test_a_changed_byte_changes_it(engine: str, tmp_path: Path) -> None:
    model = make_fake_model(tmp_path / "model")
    made = prepare(read(MODEL_NAME=str(model), DEPLOYMENT_FRAMEWORK="fake", CACHE_DIR=str(tmp_path)))
    made = replace(made, template_path=tmp_path / "texts")

    def write(name: str, data: bytes) -> None:
        (path := tmp_path / name).parent.mkdir(exist_ok=True)
        head = len(HEADER).to_bytes(8, "little") + HEADER if path.suffix == ".safetensors" else b""
        path.write_bytes(head + data)

    deciding = SETTINGS.union(WEIGHTS[engine])
    for name in SETTINGS.union(OTHERS, *WEIGHTS.values()):
        write(name, b"xxxxx")
    before = await fingerprint(made, engine)
    for name in SETTINGS.union(OTHERS, *WEIGHTS.values()):
        write(name, b"xxxyx")
        assert (await fingerprint(made, engine) != before) is (name in deciding), name
        write(name, b"xxxxx")
    assert await fingerprint(made, engine, special=False) != before
    assert await fingerprint(made, engine, arithmetic="other") != before
    assert await fingerprint(made, engine, invariant=False) == f"{before}-batch"
    (tmp_path / "texts/chat_template.jinja").rename(tmp_path / "texts/no_template.jinja")
    without = await fingerprint(made, engine)
    (tmp_path / "texts/chat_template.json").rename(tmp_path / "texts/chat_template.jinja")
    after = await fingerprint(made, engine)
    assert len({before, without, after}) == 3  # names count, and directories do not
    (tmp_path / "texts").rename(tmp_path / "moved")
    assert await fingerprint(replace(made, template_path=tmp_path / "moved"), engine) == after
