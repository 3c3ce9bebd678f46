"""The one sentence on the optimality gap of a schedule."""

import pytest

from rekindle.core import gap_sentence


@pytest.mark.parametrize(
    ("cost", "bound", "sentence"),
    [
        (100, None, "optimality gap unknown"),
        (100, 100, "proven optimal"),
        (100, 101, "proven optimal"),
        (1018, 1000, "within 1.8 % of optimal"),
        (100_001, 100_000, "within 0.01 % of optimal"),  # rounded up, never down to 0
        (10_151, 10_000, "within 1.6 % of optimal"),
        (1100, 1001, "optimality gap at most 9.0 %"),
        (142, 119, "optimality gap at most 17 %"),
        (5, 0, "optimality gap at most 100 %"),
        (0, 0, "proven optimal"),
    ],
)
def test_sentences(cost: int, bound: int | None, sentence: str) -> None:
    assert gap_sentence(cost, bound) == sentence
