"""A managed model equals eager while its Python changes between steps, or refuses by name.

The cases are in `support.living`, each under the number of its finding. `make test` runs those that
are marked as quick; all of them, under every budget and answer to a missed plan, are slow.
"""

from collections.abc import Iterator

import pytest
import torch
from support.living.campaign import How, judge
from support.living.every import CASES

QUICK = How("smallest", "eager")
FULL = (
    How("1.0", "eager", profile="measure"),
    How("0.75", "replan"),
    How("smallest", "eager"),
    How("smallest", "raise"),
    How("thrice", "replan"),
)


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    """What one test compiled counts against no other's limits."""
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.quick])
def test_living(name: str) -> None:
    check(name, QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("how", FULL, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_living_under(name: str, how: How) -> None:
    check(name, how)


def check(name: str, how: How) -> None:
    outcome = judge(CASES[name], how)
    assert outcome.ok, f"{outcome.kind}: {outcome.detail}"
