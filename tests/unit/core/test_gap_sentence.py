"""The one sentence on how far from optimal a schedule can be."""

import pytest

from rekindle.core import gap_sentence


@pytest.mark.parametrize(
    ("cost", "bound", "sentence"),
    [
        (100, None, "how far from optimal is not known"),
        (100, 100, "proven optimal"),
        (100, 101, "proven optimal"),
        (1018, 1000, "within 1.8 % of optimal"),
        (100_001, 100_000, "within 0.01 % of optimal"),  # rounded up, never down to 0
        (10_151, 10_000, "within 1.6 % of optimal"),
        (1100, 1001, "no schedule is more than 9.0 % cheaper; that any is, is unproven"),
        (142, 119, "no schedule is more than 17 % cheaper; that any is, is unproven"),
        (5, 0, "no schedule is more than 100 % cheaper; that any is, is unproven"),
        (0, 0, "proven optimal"),
    ],
)
def test_sentences(cost: int, bound: int | None, sentence: str) -> None:
    assert gap_sentence(cost, bound) == sentence
