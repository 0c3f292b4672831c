"""`tgis simulate`: simulate the latency and throughput of a trace of requests, without a model."""

import json
from argparse import Namespace
from collections.abc import Iterable
from pathlib import Path

from tgis.batcher.capacity import BatchLimits
from tgis.bench.simulate import (
    SMOLLM2_TWO_CORES,
    SimulatedEngine,
    Simulation,
    TraceRequest,
    bimodal_trace,
    lognormal_trace,
    read_trace,
)
from tgis.engines.fake import StepModel
from tgis.errors import OptionError
from tgis.utils.options import Parser, decimal, integer

COUNT, NUMBER, SHARE = integer(1), integer(0), decimal(0, 1)
RATE, TIME = decimal(0, 1e6, exclude_low=True), decimal(0, 1e6)
_PARTS = ("step", "row", "context", "prefill", "prefill_token", "prefill_context")  # of the time of a step


def main(argv: list[str], prog: str) -> int:
    """Simulate; print a table, and the same numbers as JSON in the last line."""
    options = _parser(prog).parse_args(argv)
    limits, jobs = _limits(options), [*_jobs(options)]
    longest = max(job.prompt_tokens + job.output_tokens for job in jobs)
    if longest > limits.max_request_tokens:
        raise OptionError(f"--weight-limit={options.weight_limit} is too low for a request of {longest} tokens")
    engine = SimulatedEngine(_model(options), options.acceptance)
    summary = Simulation(limits, engine, jobs, options.clients).run().summary()
    for name, value in summary.items():
        print(f"{name:<22}{value:>14,.4g}" if value < 1000 else f"{name:<22}{value:>14,.0f}")
    print(json.dumps(summary))
    return 0


def _parser(prog: str) -> Parser:
    parser = Parser(prog=prog, description="Simulate latency and throughput of a trace of requests, without a model.")
    trace = parser.add_argument_group("Requests")
    trace.add_argument("--trace", default="lognormal", help="lognormal, bimodal, or a CSV file (default: lognormal)")
    trace.add_argument("--requests", type=COUNT, default=300, help="number of random requests (default: 300)")
    trace.add_argument("--rate", type=RATE, default=4.0, help="arrivals per second (default: 4)")
    trace.add_argument("--clients", type=NUMBER, default=0, help="closed loop with this many clients, not a rate")
    trace.add_argument("--seed", type=NUMBER, default=1, help="of the random requests (default: 1)")
    batch = parser.add_argument_group("Batcher")
    batch.add_argument("--max-batch-size", type=COUNT, default=64, help="default: 64")
    batch.add_argument("--max-prefill-padding", type=SHARE, default=0.2, help="default: 0.2")
    batch.add_argument("--max-waiting-tokens", type=NUMBER, default=24, help="default: 24")
    batch.add_argument("--weight-limit", type=COUNT, default=1 << 40, help="context tokens (default: no limit)")
    batch.add_argument("--prefill-tokens", type=COUNT, default=512, help="per step (default: 512)")
    batch.add_argument("--max-prefill-gap-ms", type=COUNT, default=250, help="of chunked (default: 250)")
    copies = "chance that a token is the next one of the prompt, which lookup then guesses (default: 0, no lookup)"
    batch.add_argument("--acceptance", type=SHARE, default=0.0, help=copies)
    engines = ["padded", "flat", "chunked", "encoder-decoder"]  # the last one has KV blocks, too
    batch.add_argument("--engine", choices=engines, default="padded", help="default: padded")
    times = parser.add_argument_group("Step time in milliseconds (default: SmolLM2 on two cores)")
    for part in _PARTS:
        default = 1000 * getattr(SMOLLM2_TWO_CORES, f"{part}_seconds")
        times.add_argument(f"--{part.replace('_', '-')}-ms", type=TIME, default=default)
    return parser


def _limits(options: Namespace) -> BatchLimits:
    return BatchLimits(
        max_batch_size=options.max_batch_size,
        token_capacity=options.weight_limit,
        prefill_tokens=options.prefill_tokens,
        max_prefill_padding=options.max_prefill_padding,
        padded=options.engine == "padded",
        block_size=_block_size(options),
        encoder_decoder=options.engine == "encoder-decoder",
        max_waiting_tokens=options.max_waiting_tokens,
        max_prefill_gap_ms=options.max_prefill_gap_ms,
        proposed_tokens=15 if options.acceptance and _block_size(options) else 0,
    )


def _model(options: Namespace) -> StepModel:
    times = {f"{part}_seconds": getattr(options, f"{part}_ms") / 1000 for part in _PARTS}
    return StepModel(padded=options.engine == "padded", block_size=_block_size(options), **times)


def _block_size(options: Namespace) -> int:
    return 0 if options.engine in ("padded", "flat") else 16


def _jobs(options: Namespace) -> Iterable[TraceRequest]:
    match options.trace:
        case "lognormal":
            return lognormal_trace(options.requests, options.rate, options.seed)
        case "bimodal":
            return bimodal_trace(options.requests, options.rate, options.seed)
        case path:
            return read_trace(Path(path))
