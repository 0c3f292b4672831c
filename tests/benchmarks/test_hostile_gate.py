"""The gate of benchmarks.chaos.hostile: which figures break the promise to honest clients."""

import json
from dataclasses import replace

import pytest

from benchmarks.chaos import hostile
from benchmarks.chaos.hostile import Figures, Round, broken_bounds

CONTROL = Figures(lag_p999=10.0, lag_max=20.0, peak_memory=200.0, first_token_p50=30.0, first_token_p99=40.0, streams=9)


def a_round(attacked: Figures = CONTROL, control: Figures = CONTROL) -> Round:
    return {"control": control, "attacked": attacked}


def with_p99(milliseconds: float) -> Round:
    return a_round(replace(CONTROL, first_token_p99=milliseconds))


def test_the_gate_is_open_at_the_bounds() -> None:
    at_the_bounds = replace(CONTROL, first_token_p99=50.0, lag_max=100.0, peak_memory=700.0)
    assert broken_bounds([a_round(at_the_bounds)]) == []


def test_the_median_of_the_ratios_decides() -> None:
    assert broken_bounds([with_p99(49.0), with_p99(400.0), with_p99(50.0)]) == []
    (broken,) = broken_bounds([with_p99(52.0), with_p99(40.0), with_p99(60.0)])
    assert "1.30 times" in broken


def test_lag_counts_unless_the_control_had_it_too() -> None:
    late = replace(CONTROL, lag_max=147.8)
    (broken,) = broken_bounds([a_round(), a_round(late)])
    assert broken.startswith("round 2, attacked: the event loop was up to 148 ms late")
    assert broken_bounds([a_round(late, late)]) == []
    assert broken_bounds([a_round(CONTROL, late)]) == []


@pytest.mark.parametrize("name", ["attacked", "control"])
@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ({"streams": 0}, "no honest stream got a token"),
        ({"failed": {"UNAVAILABLE: drained": 1}}, "UNAVAILABLE: drained"),
        ({"wrong": 1}, "1 honest streams got the wrong text"),
        ({"unhealthy": {"503: ": 2}}, "health probes failed"),
    ],
)
def test_nothing_may_fail_in_any_round(name: str, fault: dict[str, object], told: str) -> None:
    (broken,) = broken_bounds([a_round(), {**a_round(), name: replace(CONTROL, **fault)}])  # type: ignore[arg-type]
    assert broken.startswith(f"round 2, {name}: ")
    assert told in broken


def test_rounds_alternate_and_the_exit_code_tells(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    order = list[bool]()

    async def run(*_: object, attacked: bool, **__: object) -> Figures:
        order.append(attacked)
        return replace(CONTROL, peak_memory=900.0 if attacked and len(order) > 4 else 1.0)

    monkeypatch.setattr(hostile, "_run", run)
    assert hostile.main(["--rounds", "2"]) == 0
    assert order == [False, True, True, False]
    assert hostile.main(["--rounds", "1"]) == 1
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["broken"] == ["round 1, attacked: the front end had 900 MiB, not 700"]
    assert report["first_token_p99_ratios"] == {"attacked": [1.0]}
