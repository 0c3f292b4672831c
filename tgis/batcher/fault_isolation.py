"""Finding the row that breaks steps: rows of a failed step are tried again in halves, down to one alone."""

from tgis.batcher.sequence import Sequence

_CHANCES = 2  # steps that a row may break alone before it is refused: an accident does not repeat itself


class Trials:
    """Numbers the groups of rows that are tried apart from each other. A row that gets a token is acquitted."""

    def __init__(self) -> None:
        self._numbers = 0

    def divide(self, rows: list[Sequence]) -> tuple[list[Sequence], list[list[Sequence]]]:
        """After a step of these rows failed: the rows to refuse, and the groups to try again."""
        if len(rows) == 1:
            rows[0].failures += 1
            refused = rows if rows[0].failures >= _CHANCES else []
            groups = [rows]
        else:
            refused, groups = [], [rows[: len(rows) // 2], rows[len(rows) // 2 :]]
        for group in groups:
            self._numbers += 1
            for row in group:
                row.trial = self._numbers
        return refused, groups
