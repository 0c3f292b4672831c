"""`tgis simulate`: what a trace of requests would see, with which options, without a model."""

import json
from argparse import Namespace
from collections.abc import Iterable
from pathlib import Path

from tgis.batcher.memory_model import BatchLimits
from tgis.bench.simulate import (
    SMOLLM2_TWO_CORES,
    SimulatedEngine,
    Simulation,
    SimulationResult,
    TraceRequest,
    bimodal_trace,
    lognormal_trace,
    plot,
    read_trace,
)
from tgis.engines.fake import StepModel
from tgis.utils.options import Parser

_MILLISECONDS = 1e-3


def main(argv: list[str], prog: str) -> int:
    """Simulate; print a table, and the same figures as JSON in the last line."""
    options = _parser(prog).parse_args(argv)
    outcome = Simulation(_limits(options), SimulatedEngine(_model(options)), _jobs(options), options.clients).run()
    summary = outcome.summary()
    for name, value in summary.items():
        print(f"{name:<22}{value:>14,.4g}" if value < 1000 else f"{name:<22}{value:>14,.0f}")
    _plot(outcome, options.plot)
    print(json.dumps(summary))
    return 0


def _parser(prog: str) -> Parser:
    parser = Parser(prog=prog, description=__doc__.partition(": ")[2])
    trace = parser.add_argument_group("the requests")
    trace.add_argument("--trace", default="lognormal", help="lognormal, bimodal, or a CSV file (default: lognormal)")
    trace.add_argument("--requests", type=int, default=300, help="how many are made up (default: 300)")
    trace.add_argument("--rate", type=float, default=4.0, help="arrivals per second (default: 4)")
    trace.add_argument("--clients", type=int, default=0, help="so many, each waiting for its answers, not arrivals")
    trace.add_argument("--seed", type=int, default=1, help="of what is made up (default: 1)")
    batch = parser.add_argument_group("the batcher")
    batch.add_argument("--max-batch-size", type=int, default=64, help="rows (default: 64)")
    batch.add_argument("--max-prefill-padding", type=float, default=0.2, help="share of a prefill (default: 0.2)")
    batch.add_argument("--max-waiting-tokens", type=int, default=24, help="steps between prefills (default: 24)")
    batch.add_argument("--weight-limit", type=int, default=1 << 40, help="tokens of context (default: no limit)")
    batch.add_argument("--prefill-tokens", type=int, default=512, help="of one prefill or step (default: 512)")
    batch.add_argument("--engine", choices=["padded", "flat", "chunked"], default="padded", help="default: padded")
    times = parser.add_argument_group("milliseconds of a step (default: SmolLM2 on two cores)")
    times.add_argument("--step-ms", type=float, default=SMOLLM2_TWO_CORES.step_seconds / _MILLISECONDS)
    times.add_argument("--row-ms", type=float, default=SMOLLM2_TWO_CORES.row_seconds / _MILLISECONDS)
    times.add_argument("--context-ms", type=float, default=SMOLLM2_TWO_CORES.context_seconds / _MILLISECONDS)
    times.add_argument(
        "--prefill-token-ms", type=float, default=SMOLLM2_TWO_CORES.prefill_token_seconds / _MILLISECONDS
    )
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the queue and the batch over time")
    return parser


def _limits(options: Namespace) -> BatchLimits:
    return BatchLimits(
        max_batch_size=options.max_batch_size,
        token_capacity=options.weight_limit,
        prefill_tokens=options.prefill_tokens,
        max_prefill_padding=options.max_prefill_padding,
        padded=options.engine == "padded",
        block_size=16 if options.engine == "chunked" else 0,
        max_waiting_tokens=options.max_waiting_tokens,
    )


def _model(options: Namespace) -> StepModel:
    return StepModel(
        padded=options.engine == "padded",
        block_size=16 if options.engine == "chunked" else 0,
        step_seconds=options.step_ms * _MILLISECONDS,
        row_seconds=options.row_ms * _MILLISECONDS,
        context_seconds=options.context_ms * _MILLISECONDS,
        prefill_token_seconds=options.prefill_token_ms * _MILLISECONDS,
    )


def _jobs(options: Namespace) -> Iterable[TraceRequest]:
    match options.trace:
        case "lognormal":
            return lognormal_trace(options.requests, options.rate, options.seed)
        case "bimodal":
            return bimodal_trace(options.requests, options.rate, options.seed)
        case path:
            return read_trace(Path(path))


def _plot(outcome: SimulationResult, path: Path | None) -> None:
    if path is not None:
        plot(outcome, path)
