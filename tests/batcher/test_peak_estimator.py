"""The analysis of a batch's peak, against the plain way: run every future step and look."""

from hypothesis import given, settings
from hypothesis import strategies as st

from tgis.batcher.memory_model import PeakEstimator

Rows = list[tuple[int, int]]  # length, rest
ROWS = st.lists(st.tuples(st.integers(1, 30), st.integers(0, 12)), max_size=7)


def naive_peak(rows: Rows, padded: bool) -> int:
    """The largest context over all steps until the last row has ended."""
    peak = 0
    for step in range(max((rest for _, rest in rows), default=-1) + 1):
        lengths = [length + step for length, rest in rows if rest >= step]
        peak = max(peak, len(lengths) * max(lengths) if padded else sum(lengths))
    return peak


@settings(max_examples=300, deadline=None)
@given(ROWS, st.booleans())
def test_the_peak_is_that_of_all_steps(rows: Rows, padded: bool) -> None:
    assert PeakEstimator(rows, padded, 10**9).peak() == naive_peak(rows, padded)


@settings(max_examples=500, deadline=None)
@given(ROWS, ROWS, st.booleans(), st.integers(0, 260))
def test_a_row_fits_if_no_step_to_come_is_over_the_limit(
    rows: Rows, candidates: Rows, padded: bool, limit: int
) -> None:
    limit = max(limit, naive_peak(rows, padded))
    forecast, batch = PeakEstimator(rows, padded, limit), list(rows)
    for length, rest in candidates:
        fits = naive_peak([*batch, (length, rest)], padded) <= limit
        assert forecast.fits(length, rest) == fits
        assert fits or not forecast.fits_worst_case(length, rest)
        if fits:
            forecast.add(length, rest)
            batch.append((length, rest))
