"""What the clients of a soak saw, in numbers; and what was wrong."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

_MAX_KEPT_PROBLEMS = 20  # problems that are kept in words


@dataclass(slots=True)
class ClientLog:
    """Calls by kind (single, batch, stream), inputs by how they ended.

    A call that its client gave up early may never have reached the server; that is counted apart.
    """

    calls: Counter[str] = field(default_factory=Counter)  # that the server has answered, if only in part
    inputs: int = 0  # of those
    uncertain_calls: Counter[str] = field(default_factory=Counter)
    uncertain_inputs: int = 0
    ends: Counter[tuple[str, str]] = field(default_factory=Counter)  # kind, stop reason: inputs with an answer
    abandoned: Counter[str] = field(default_factory=Counter)  # kind: inputs whose end the client did not wait for
    expired: int = 0  # inputs that ended while they waited, without a token
    tokens: int = 0  # of the answered inputs
    refused: Counter[str] = field(default_factory=Counter)  # status: calls
    refused_inputs: int = 0
    malformed: int = 0  # calls whose bytes were no message
    killed_clients: int = 0  # client processes
    compared: int = 0  # answers that were checked
    num_problems: int = 0
    problems: list[str] = field(default_factory=list)

    def record_call(self, kind: str, inputs: int) -> None:
        """The server has told something about this call."""
        self.calls[kind] += 1
        self.inputs += inputs

    def record_uncertain(self, kind: str, inputs: int) -> None:
        """The client left before the server told anything."""
        self.uncertain_calls[kind] += 1
        self.uncertain_inputs += inputs
        self.abandoned[kind] += inputs

    def record_end(self, kind: str, reason: str, tokens: int) -> None:
        """An input has been answered."""
        self.ends[kind, reason] += 1
        self.tokens += tokens
        self.expired += not tokens

    def record_refused(self, status: str, kind: str, inputs: int) -> None:
        """A call was refused, with this status."""
        self.record_call(kind, inputs)
        self.refused[status] += 1
        self.refused_inputs += inputs

    def add_problem(self, text: str) -> None:
        """Something that may not be."""
        self.num_problems += 1
        if len(self.problems) < _MAX_KEPT_PROBLEMS:
            self.problems.append(text)

    def add_problems(self, texts: Iterable[str]) -> None:
        """Each is one."""
        for text in texts:
            self.add_problem(text)
