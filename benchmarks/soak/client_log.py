"""What the clients of a soak saw, counted, and the problems that they found."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

_MAX_KEPT_PROBLEMS = 20  # beyond that they are only counted


@dataclass(slots=True)
class ClientLog:
    """Calls by kind (single, batch, stream), inputs by how they ended.

    A call that its client cancelled early may never have reached the server: it is counted as uncertain.
    """

    calls: Counter[str] = field(default_factory=Counter)  # the server sent some response
    inputs: int = 0  # of those calls
    uncertain_calls: Counter[str] = field(default_factory=Counter)
    uncertain_inputs: int = 0
    ends: Counter[tuple[str, str]] = field(default_factory=Counter)  # (kind, stop reason) -> answered inputs
    abandoned: Counter[str] = field(default_factory=Counter)  # kind -> inputs whose end the client did not wait for
    expired: int = 0  # inputs that ended in the queue, without a token
    tokens: int = 0  # of answered inputs
    refused: Counter[str] = field(default_factory=Counter)  # status -> calls
    refused_inputs: int = 0
    malformed: int = 0  # calls whose bytes were no message
    killed_clients: int = 0  # client processes
    compared: int = 0  # answers
    num_problems: int = 0
    problems: list[str] = field(default_factory=list)

    def record_call(self, kind: str, inputs: int) -> None:
        """The server has responded to this call."""
        self.calls[kind] += 1
        self.inputs += inputs

    def record_uncertain(self, kind: str, inputs: int) -> None:
        """The client cancelled before the server responded."""
        self.uncertain_calls[kind] += 1
        self.uncertain_inputs += inputs
        self.abandoned[kind] += inputs

    def record_end(self, kind: str, reason: str, tokens: int) -> None:
        """An input was answered to its end."""
        self.ends[kind, reason] += 1
        self.tokens += tokens
        self.expired += not tokens

    def record_refused(self, status: str, kind: str, inputs: int) -> None:
        self.record_call(kind, inputs)
        self.refused[status] += 1
        self.refused_inputs += inputs

    def add_problem(self, text: str) -> None:
        self.num_problems += 1
        if len(self.problems) < _MAX_KEPT_PROBLEMS:
            self.problems.append(text)

    def add_problems(self, texts: Iterable[str]) -> None:
        for text in texts:
            self.add_problem(text)
