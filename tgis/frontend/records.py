"""Records of answers: all that an answer depends on, and what it was, as a line of JSON that `tgis verify` reads."""

import logging
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec.structs import replace

from tgis.frontend.calls import GenerateCall
from tgis.frontend.output import Output
from tgis.frontend.params import Params
from tgis.ipc.messages import EngineInfo
from tgis.ipc.request import TokenLogprobs
from tgis.utils.private_file import append_line

log = logging.getLogger(__name__)

# The API of calls whose answers are compared with a record; they are not recorded.
REPLAYED = "replay"
_REASONS = dict.fromkeys(("MAX_TOKENS", "TOKEN_LIMIT"), "LENGTH")  # others have the names of gRPC
# Those that the ids of the prompt and the length of the output do not say already.
_RECORDED = ("bad_words", "grammar", "include_stop_sequence", "skip_special_tokens", "stop_sequences")


class Record(msgspec.Struct, omit_defaults=True, kw_only=True):
    """One answer. Logprobs are as the engine reports them: the logprob, the rank and the candidates of each token."""

    version: int
    time: float  # its end, in seconds since 1970
    api: str
    model: str
    fingerprint: str
    adapter: str | None = None
    adapter_digest: str | None = None
    prompt_ids: Sequence[int]
    parameters: Params  # the seed is included
    output_ids: Sequence[int]
    text: str
    stop_reason: str
    logprobs: list[TokenLogprobs] = []


class Recorder:
    """Makes the records of a server, and appends them to a file if there is one. One of half the size or more becomes
    FILE.1, in place of that before.
    """

    def __init__(self, engine: EngineInfo, model: str = "", file: Path | None = None, max_bytes: int = 0) -> None:
        self._engine, self._model, self.file, self._max_bytes = engine, model, file, max_bytes

    def record(self, call: GenerateCall, output: Output) -> str:
        """The record of an output, as JSON."""
        ended = output.stop_reason.name if output.stop_reason else "CANCELLED"
        request, adapter = output.request, output.request.adapter
        record = Record(
            version=1,
            time=round(time.time(), 3),
            api=call.api,
            model=self._model,
            fingerprint=self._engine.fingerprint,
            adapter=adapter.id if adapter else None,
            adapter_digest=f"{adapter.version:016x}" if adapter else None,
            prompt_ids=request.tokens[request.soft_prompt_length :],
            parameters=_recorded_params(output),
            output_ids=output.token_ids,
            text="".join(output.texts),
            stop_reason=_REASONS.get(ended, ended),
            logprobs=output.logprobs,
        )
        return msgspec.json.encode(record).decode()

    def write(self, call: GenerateCall, outputs: Sequence[Output]) -> None:
        """Append the records of the outputs of a call, except of those that have failed or have no token."""
        if not self.file or call.api == REPLAYED:
            return
        try:
            for output in outputs:
                if output.token_ids and not output.engine_output.error:
                    size = append_line(self.file, self.record(call, output))
                    if size >= self._max_bytes // 2:
                        self.file.replace(f"{self.file}.1")
        except OSError as error:
            log.error("answers could not be recorded: %s", error)


def _recorded_params(output: Output) -> Params:
    params, request = output.params, output.request
    return Params(
        sampling=replace(request.sampling_params, bad_words=()),  # `bad_words` has them as texts
        logprob_options=replace(params.logprob_options, generated_tokens=True, input_tokens=False),
        seed=request.sampling_params.seed,
        max_new_tokens=request.max_new_tokens,
        **{name: getattr(params, name) for name in _RECORDED},
    )
