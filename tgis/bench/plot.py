"""Plots of a load test and of a simulation with matplotlib, which only this module needs (the extra `bench`)."""

from importlib.util import find_spec
from pathlib import Path

from tgis.bench.measure import LevelResult, Report
from tgis.bench.simulate import SimulationResult
from tgis.errors import OptionError


def require_matplotlib() -> None:
    """OptionError if it is not installed: before the run, not after it."""
    if find_spec("matplotlib") is None:
        raise OptionError("--plot needs matplotlib: pip install 'tgis[bench]'")


def draw_report(report: Report, path: Path) -> None:
    """Write a PNG: output tokens per second of each level, and the distribution of latencies."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - an extra, and slow to import

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot(
        [result.level.value for result in report.results],
        [result.summary().output_tokens_per_s for result in report.results],
        marker="o",
    )
    left.set(xlabel=report.settings.levels[0].name, ylabel="output tokens/s", ylim=(0, None))
    for result in report.results:
        latencies, shares = _distribution(result)
        right.step(latencies, shares, where="post", label=f"{result.level.name} {result.level.value:g}")
    right.set(xlabel="latency, seconds", ylabel="share of requests", xlim=(0, None), ylim=(0, 1))
    right.legend()
    figure.suptitle(report.settings.target)
    figure.savefig(path, format="png", dpi=120)


def _distribution(result: LevelResult) -> tuple[list[float], list[float]]:
    """Latencies in ascending order, and the share of requests that took no longer."""
    latencies = sorted(sample.ended_at - sample.scheduled_at for sample in result.records if sample.status == "OK")
    return latencies, [(i + 1) / len(latencies) for i in range(len(latencies))]


def draw_simulation(result: SimulationResult, path: Path) -> None:
    """Draw the queue and the batch over time."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - an extra, and slow to import

    figure = Figure(figsize=(10, 4), layout="constrained")
    axes = figure.subplots()
    times = [sample.time for sample in result.samples]
    axes.step(times, [sample.num_running for sample in result.samples], label="running", where="post")
    axes.step(times, [sample.num_waiting for sample in result.samples], label="waiting", where="post")
    axes.set(xlabel="seconds", ylabel="requests")
    axes.legend()
    figure.savefig(path)
