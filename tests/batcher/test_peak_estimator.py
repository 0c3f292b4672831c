"""The peak of a batch, against the naive way: run every future step and look."""

from hypothesis import given, settings
from hypothesis import strategies as st

from tgis.batcher.capacity import PeakEstimator

Lengths = list[tuple[int, int]]  # length, remaining tokens
SEQS = st.lists(st.tuples(st.integers(1, 30), st.integers(0, 12)), max_size=7)


def naive_peak(seqs: Lengths, padded: bool) -> int:
    """The largest context over all steps until the last sequence has ended."""
    peak = 0
    for step in range(max((remaining for _, remaining in seqs), default=-1) + 1):
        lengths = [length + step for length, remaining in seqs if remaining >= step]
        peak = max(peak, len(lengths) * max(lengths) if padded else sum(lengths))
    return peak


@settings(max_examples=500)
@given(SEQS, SEQS, st.booleans(), st.integers(0, 260))
def test_a_sequence_fits_if_no_future_step_exceeds_the_limit(
    seqs: Lengths, candidates: Lengths, padded: bool, limit: int
) -> None:
    limit = max(limit, naive_peak(seqs, padded))
    estimator, batch = PeakEstimator(seqs, padded, limit), list(seqs)
    for length, remaining in candidates:
        fits = naive_peak([*batch, (length, remaining)], padded) <= limit
        assert estimator.fits(length, remaining) == fits
        assert fits or not estimator.fits_worst_case(length, remaining)
        if fits:
            estimator.add(length, remaining)
            batch.append((length, remaining))
