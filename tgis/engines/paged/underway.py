"""A step between its launch and its result: the device has been told of it, the host has nothing of it yet."""

from dataclasses import dataclass, field

from tgis.batcher.sequence import Sequence
from tgis.engines.paged.prompt_logprobs import PromptChunk
from tgis.engines.sampling.logprobs import HostTable, PendingCopy
from tgis.engines.sampling.sampler import SampledTokens, SamplerOutput


@dataclass(slots=True)
class InFlightStep:
    """What comes of it, in one copy that is on its way."""

    sampled: SampledTokens
    prompt_chunks: list[PromptChunk]
    _pending: PendingCopy = field(init=False)

    def __post_init__(self) -> None:
        told = [each for part in self.prompt_chunks for each in part.tables]
        self._pending = PendingCopy([*self.sampled.tables, *told])

    @property
    def seqs(self) -> list[Sequence]:
        """Those that get a token."""
        return self.sampled.seqs

    def wait(self) -> tuple[SamplerOutput, list[HostTable]]:
        """The tokens, and the tables of the parts."""
        fetched = self._pending.wait()
        count = len(self.sampled.tables)
        return self.sampled.output(fetched[:count]), fetched[count:]
