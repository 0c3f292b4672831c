"""GGUF files: headers that are broken or hostile, and the configuration and tokenizer that are made of one."""

import importlib.util
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_templates import load_template
from gguf import GGUFWriter
from gguf_files import permuted, write_gguf
from tiny_models import make_config
from tokenizers import Tokenizer
from transformers import AutoConfig
from transformers.convert_slow_tokenizer import bytes_to_unicode

from tgis.errors import StartError
from tgis.models import staging
from tgis.models.convert import gguf
from tgis.models.convert.fast_tokenizer import ensure_tokenizer
from tgis.models.convert.weights import ensure_weights
from tgis.models.files import eos_token_ids, find_model, find_weights, max_sequence_length

TOKENS = ["<s>", "</s>", "<|eot|>", *bytes_to_unicode().values(), "he", "ll", "hell"]
FACTORS = np.array([1, 2.5, 4, 8], dtype=np.float32)
TEMPLATE = "{{ messages[0].content }}"


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def entry(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor(shape: tuple[int, ...] = (32,), kind: int = 0) -> bytes:
    return text("a") + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, 0)


ARCHITECTURE = entry("general.architecture", 8, text("llama"))


def file(*entries: bytes, tensors: tuple[bytes, ...] = ()) -> bytes:
    header = b"GGUF\3\0\0\0" + struct.pack("<QQ", len(tensors), len(entries)) + b"".join([*entries, *tensors])
    return header + bytes(-len(header) % 32 + 128)


UNREADABLE = "it is not a GGUF file that can be read: "
HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", UNREADABLE),
    "cut": (file(ARCHITECTURE)[:40], UNREADABLE),
    "no architecture": (file(entry("general.architecture", 0, b"\1")), "general.architecture 1, "),
    "type": (file(ARCHITECTURE, tensors=(tensor((256,), kind=10),)), "'a' has type Q2_K, only F32, F16, BF16, Q4_0"),
    "no numbers": (file(ARCHITECTURE, tensors=(tensor((0, 5)),)), "'a' has shape [5, 0]"),
    "huge": (file(ARCHITECTURE, tensors=(tensor((2**63,) * 4),)), UNREADABLE),
    "cut numbers": (file(ARCHITECTURE, tensors=(tensor(),))[:-1], UNREADABLE),
}


@pytest.mark.parametrize(("content", "message"), HOSTILE.values(), ids=HOSTILE)
def test_a_broken_header_is_one_line(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "any.gguf").write_bytes(content)
    with pytest.raises(StartError) as caught:
        gguf.read_file(tmp_path / "any.gguf")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def write(
    path: Path, kind: str = "gpt2", pre: str | None = "llama-bpe", rope: str = "none", *, factors: bool = True
) -> None:
    """A Llama with everything in its header."""
    config = make_config("Llama")
    config.vocab_size, config.hidden_act = len(TOKENS), "silu"

    def header(writer: GGUFWriter) -> None:
        for add, value in {
            writer.add_block_count: 2, writer.add_context_length: 64, writer.add_embedding_length: 32,
            writer.add_feed_forward_length: 48, writer.add_head_count: 4, writer.add_head_count_kv: 2,
            writer.add_layer_norm_rms_eps: 1e-6, writer.add_rope_freq_base: 5000.0, writer.add_key_length: 8,
            writer.add_vocab_size: len(TOKENS), writer.add_tokenizer_model: kind, writer.add_token_list: TOKENS,
            writer.add_token_merges: ["h e", "l l", "he ll"], writer.add_token_types: [3] * 3 + [1] * (len(TOKENS) - 3),
            writer.add_bos_token_id: 0, writer.add_eos_token_id: 1, writer.add_eot_token_id: 2,
            writer.add_add_bos_token: True, writer.add_chat_template: TEMPLATE,
        }.items():  # fmt: skip
            add(value)
        if pre is not None:
            writer.add_tokenizer_pre(pre)
        writer.add_string("llama.rope.scaling.type", rope)
        if factors:
            writer.add_tensor("rope_freqs.weight", FACTORS)

    write_gguf(path, config, "llama", "F16", permuted, header)


def test_configuration_and_tokenizer_come_from_the_header(tmp_path: Path) -> None:
    write(tmp_path / "any.gguf")
    name = gguf.ensure_directory(str(tmp_path), tmp_path / "cache")
    assert gguf.ensure_directory(str(tmp_path / "any.gguf"), tmp_path / "cache") == name
    model = find_model(name, None, None)
    assert find_weights(model.path) == (model.path / "model.gguf",)
    assert ensure_weights(model.path, tmp_path / "cache") == model.path
    assert (model.path / "model.gguf").resolve() == tmp_path / "any.gguf"
    assert max_sequence_length(model.config) == 64
    assert model.config["quantization_config"] == {"quant_method": "gguf"}
    assert ensure_tokenizer(model, tmp_path / "cache") == model.path
    assert eos_token_ids(model) == (1, 2)
    assert Tokenizer.from_file(f"{name}/tokenizer.json").encode("hell o<|eot|>").ids == [
        *(0, TOKENS.index("hell"), TOKENS.index("Ġ"), TOKENS.index("o"), 2)
    ]
    template = load_template(model.path)
    assert template.mentions(TEMPLATE)
    config = AutoConfig.from_pretrained(name)
    rope = config.rope_parameters
    assert (rope["rope_theta"], rope["rope_type"], config.head_dim) == (5000.0, "longrope", 8)
    assert rope["short_factor"] == rope["long_factor"] == FACTORS.tolist()


def test_the_process_that_converts_says_why_it_cannot(tmp_path: Path) -> None:
    (tmp_path / "any.gguf").write_bytes(HOSTILE["type"][0])
    with pytest.raises(StartError, match=f"^{tmp_path}/any.gguf: 'a' has type Q2_K, only"):
        gguf.ensure_directory(str(tmp_path), tmp_path / "cache")


def convert_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "run_child", lambda command, seconds: gguf.convert_here(Path(command[-1])))


def test_the_base_of_rotary_embeddings_is_the_headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "any.gguf", factors=False)
    convert_in_this_process(monkeypatch)
    config = AutoConfig.from_pretrained(gguf.ensure_directory(str(tmp_path), tmp_path / "cache"))
    assert config.rope_parameters == {"rope_theta": 5000.0, "rope_type": "default"}


def test_files_beside_win(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "any.gguf", kind="rwkv", rope="yarn")
    make_config("Llama").save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "README.md").touch()
    convert_in_this_process(monkeypatch)
    monkeypatch.chdir(tmp_path)
    name = Path(gguf.ensure_directory("any.gguf", tmp_path / "cache"))
    made = {"config.json", "generation_config.json", "gguf_header.json", "model.gguf", "tokenizer.json"}
    assert {path.name for path in name.iterdir()} <= made
    assert (name / "model.gguf").resolve() == tmp_path / "any.gguf"
    assert find_model(str(name), None, None).config["vocab_size"] == make_config("Llama").vocab_size
    assert (name / "tokenizer.json").resolve() == tmp_path / "tokenizer.json"
    assert "quantization_config" not in (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert Path(gguf.ensure_directory(str(tmp_path), tmp_path / "cache")) != name


def test_which_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert gguf.find_gguf(str(tmp_path)) is None
    commit = "0" * 40
    cached = tmp_path / "models--org--name" / "snapshots" / commit / "c.gguf"
    cached.parent.mkdir(parents=True)
    cached.write_bytes(b"")
    assert gguf.find_gguf("org/name", commit, str(tmp_path)) == cached
    assert gguf.find_gguf("org/name", None, str(tmp_path)) is None
    assert gguf.find_gguf("x" * 5000) is None
    (tmp_path / "a.gguf").write_bytes(b"")
    assert gguf.find_gguf(str(tmp_path)) == tmp_path / "a.gguf"
    monkeypatch.setattr(staging, "run_child", lambda command, seconds: "no header")
    with pytest.raises(StartError, match=f"^{tmp_path}/a.gguf: no header"):
        gguf.ensure_directory(str(tmp_path), tmp_path / "cache")
    (tmp_path / "b.gguf").write_bytes(b"")
    with pytest.raises(StartError, match=r"has 2 GGUF files, MODEL_NAME must name one of them: a\.gguf, b\.gguf$"):
        gguf.find_gguf(str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(StartError, match=r"b\.gguf needs the package gguf: pip install 'tgis\[gguf\]'$"):
        gguf.ensure_directory(str(tmp_path / "b.gguf"), tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert gguf.ensure_directory(str(tmp_path), tmp_path) == str(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pre": "unheard-of"}, "its pre-tokenizer 'unheard-of' is unknown: put tokenizer.json next to the file"),
        ({"kind": "rwkv"}, "its tokenizer 'rwkv' is unknown: put tokenizer.json next to the file"),
        ({"rope": "yarn"}, "of type 'llama' with rope.scaling.type 'yarn': put config.json next to the file"),
    ],
)
def test_what_a_header_does_not_say_well_is_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    write(tmp_path / "model.gguf", **change)
    with pytest.raises(StartError, match=message):
        gguf.convert_here(tmp_path)


@pytest.mark.parametrize(
    ("pre", "expected"), [("gpt-2", ["a", "Ġ123", "Ġb"]), ("smollm", ["a", "Ġ", "1", "2", "3", "Ġb"])]
)
def test_pre_tokenizers(pre: str, expected: list[str], tmp_path: Path) -> None:
    write(tmp_path / "model.gguf", pre=pre)
    gguf.convert_here(tmp_path)
    splits = Tokenizer.from_file(str(tmp_path / "tokenizer.json")).pre_tokenizer.pre_tokenize_str("a 123 b")
    assert [piece for piece, _ in splits] == expected
