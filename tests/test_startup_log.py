"""The lines that say what was started."""

import os
from typing import Any

import msgspec
import pytest
from tables import table

from tgis import __version__, startup_log
from tgis.config import Config
from tgis.ipc.messages import EngineInfo
from tgis.startup_log import startup_lines

INFO = EngineInfo("tgis_native", "LlamaForCausalLM", "cpu", "bfloat16", 10, False, False, 64, 100, 100)


def lines(reason: str = "", api_port: int | None = 3000, **options: Any) -> dict[str, str]:
    """The text of each line by its name."""
    of_engine = {name: options.pop(name) for name in {*options} & {*EngineInfo.__struct_fields__}}
    config = Config(model_name="m", **options)
    info = msgspec.structs.replace(INFO, **of_engine)
    shown = startup_lines(config, info, reason, (2048, 1024), (8033, 3000, api_port))
    assert {line[9] for line in shown} == {" "}
    assert not [line for line in shown if line[10] == " "]  # aligned
    return {line.split()[0]: line[10:] for line in shown}


@table("startup", "lines")
def test_a_line(row: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup_log, "cpu_quota", lambda: 2.5)
    all_lines = lines(**row["options"])
    assert list(all_lines) == ["versions", "engine", "device", "limits", "ports", "try"]
    threads = f"3 threads on {len(os.sched_getaffinity(0))} CPUs"
    found, text = all_lines[row["line"]], row["text"].replace("VERSION", __version__).replace("THREADS", threads)
    assert found.startswith(text) if text.endswith(" ") else found == text
