"""A step between its launch and its result: the device has been told of it, the host has nothing of it yet."""

from dataclasses import dataclass, field

from tgis.batcher.sequence import Sequence
from tgis.engines.paged.prompt_logprobs import Part
from tgis.engines.sampling.logprobs import Fetched, Tables
from tgis.engines.sampling.sampler import Choice, Draft


@dataclass(slots=True)
class Underway:
    """What comes of it, in one copy that is on its way."""

    draft: Draft
    parts: list[Part]
    _tables: Tables = field(init=False)

    def __post_init__(self) -> None:
        told = [each for part in self.parts for each in part.passes]
        self._tables = Tables([*self.draft.passes, *told])

    @property
    def rows(self) -> list[Sequence]:
        """Those that get a token."""
        return self.draft.rows

    def wait(self) -> tuple[Choice, list[Fetched]]:
        """The tokens, and the tables of the parts."""
        fetched = self._tables.wait()
        count = len(self.draft.passes)
        return self.draft.choice(fetched[:count]), fetched[count:]
