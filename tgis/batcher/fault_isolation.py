"""Finding the row that breaks steps: rows of a failed step are tried again in halves, down to one alone."""

from tgis.batcher.sequence import Sequence

_MAX_SOLO_FAILURES = 2  # steps that a row may break alone before it is refused: an accident does not repeat itself


class FaultIsolator:
    """Numbers the groups of rows that are tried apart from each other. A row that gets a token is acquitted."""

    def __init__(self) -> None:
        self._last_group = 0

    def split(self, rows: list[Sequence]) -> tuple[list[Sequence], list[list[Sequence]]]:
        """After a step of these rows failed: the rows to refuse, and the groups to try again."""
        if len(rows) == 1:
            rows[0].solo_failures += 1
            refused = rows if rows[0].solo_failures >= _MAX_SOLO_FAILURES else []
            groups = [rows]
        else:
            refused, groups = [], [rows[: len(rows) // 2], rows[len(rows) // 2 :]]
        for group in groups:
            self._last_group += 1
            for row in group:
                row.retry_group = self._last_group
        return refused, groups
