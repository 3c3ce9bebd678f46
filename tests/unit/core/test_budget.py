import math

import pytest

from rekindle.core import is_fraction, parse_budget
from rekindle.errors import InvalidBudget

PEAK = 1001


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (1, 1),
        ("7", 7),
        (" 8 GiB ", 8 * 2**30),
        ("8GiB", 8 * 2**30),
        ("8gb", 8 * 10**9),
        ("1.5KiB", 1536),
        ("0.5 MB", 500_000),
        ("1TB", 10**12),
        ("2TiB", 2 * 2**40),
        ("3B", 3),
        ("0.5", 500),
        (0.5, 500),
        (".5", 500),
        (1.0, PEAK),
        ("1.", PEAK),
        ("1.0", PEAK),
        # In binary 0.1 is a little more than 0.1; what was written counts.
        (0.1, 100),
        (2**62 - 1, 2**62 - 1),
    ],
)
def test_understood(text, expected):
    assert parse_budget(text, PEAK) == expected


@pytest.mark.parametrize(
    "text",
    [
        *("8XB", "0", "-1", "1.5", "NaN", "nan", "inf", "-inf", "", " ", "GiB", "1e9", "0x10"),
        *("0.0", "-0.5", "1.0001", "8 GiB 2", "8,5GiB", "0GiB", "-8GiB", "1_000", "٣", "9" * 80),
        *(0, -1, 1.5, 0.0, -0.5, math.nan, math.inf, True, False, None, 2**62, [1], b"1"),
    ],
)
def test_refused(text):
    with pytest.raises(InvalidBudget, match=r"budget .* is not understood: give bytes as a whole"):
        parse_budget(text, PEAK)


def test_fraction_is_exact_on_large_peaks():
    assert parse_budget("0.3", 10**18 + 1) == 3 * 10**17


def test_what_is_a_fraction():
    fractions = (0.5, 1.0, "0.5", " .25 ", "1.")
    others = (1, "1", "8GiB", "0.5GiB", "half", None, True, "")
    assert all(is_fraction(budget) for budget in fractions)
    assert not any(is_fraction(budget) for budget in others)
