"""Expressions over sizes: what they are for given sizes, and what is refused."""

import copy
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.core.sizes import Conditions, SizeTable, check_expression, expression
from rekindle.errors import InvalidProblem

NAMES = ("s0", "s1")
LEAVES = st.one_of(st.integers(0, 4096).map(str), st.sampled_from(NAMES))


def joined(parts: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    two = st.tuples(parts, parts)
    return st.one_of(
        st.tuples(two, st.sampled_from("+-*")).map(lambda x: f"({x[0][0]} {x[1]} {x[0][1]})"),
        st.tuples(parts, st.integers(1, 512)).map(lambda x: f"(({x[0]} + {x[1]} - 1)//{x[1]})"),
        st.tuples(parts, st.integers(1, 9)).map(lambda x: f"({x[0]} % {x[1]})"),
        two.map(lambda x: f"max({x[0]}, {x[1]})"),
        two.map(lambda x: f"min({x[0]}, {x[1]})"),
        parts.map(lambda x: f"(-{x})"),
    )


EXPRESSIONS = st.recursive(LEAVES, joined, max_leaves=8)


@given(st.lists(EXPRESSIONS, max_size=5), st.integers(0, 10**6), st.integers(0, 10**6))
def test_a_table_is_what_python_computes(texts: list[str], a: int, b: int) -> None:
    table = SizeTable(NAMES, tuple(texts))
    wanted = tuple(eval(text, {"s0": a, "s1": b, "max": max, "min": min}) for text in texts)
    assert table.at((a, b)) == wanted
    assert pickle.loads(pickle.dumps(table)).at((a, b)) == wanted
    assert [expression(NAMES, text)(a, b) for text in texts] == list(wanted)


@given(EXPRESSIONS, EXPRESSIONS, st.integers(0, 999), st.integers(0, 999))
def test_conditions_hold_where_python_says_so(one: str, other: str, a: int, b: int) -> None:
    texts = (f"{one} <= {other}", f"{one} != 7")
    conditions = copy.deepcopy(Conditions(NAMES, texts))
    scope = {"s0": a, "s1": b, "max": max, "min": min}
    wanted = [bool(eval(text, scope)) for text in texts]
    assert conditions.hold((a, b)) is all(wanted)
    broken = conditions.broken((a, b))
    assert broken == next((t for t, holds in zip(texts, wanted, strict=True) if not holds), None)


def test_a_share_of_nothing_holds_for_no_sizes() -> None:
    assert Conditions(("n",), ("8 % n == 0",)).hold((4,))
    assert not Conditions(("n",), ("8 % n == 0",)).hold((0,))
    assert Conditions(("n",), ()).hold((0,))


def test_a_quotient_is_python_s() -> None:
    assert expression(("n",), "1.0 / float(n)")(3) == 1.0 / 3


@pytest.mark.parametrize(
    "text",
    [
        *("__import__('os')", "s0.real", "s0[0]", "(lambda: 1)()", "open('x')", "s2", "'a'", "1.5"),
        *(
            "s0 if s1 else 1",
            "[s0]",
            "s0 == 1",
            "s0 and s1",
            "s0 / 2",
            "2**s0",
            "10**10",
            "",
            "s0 +",
        ),
        *("max(s0, key=s1)", "{s0}", "f'{s0}'", "s0 := 1", "(s0,)", "True", "s0 @ s1", "s0 << 40"),
    ],
)
def test_anything_else_is_refused_before_it_is_compiled(text: str) -> None:
    with pytest.raises(InvalidProblem, match="is no expression over"):
        check_expression(text, NAMES)
    with pytest.raises(InvalidProblem):
        SizeTable(NAMES, (text,))


def test_a_name_that_is_none_is_refused() -> None:
    with pytest.raises(InvalidProblem, match="no name"):
        SizeTable(("a b",), ())
    with pytest.raises(InvalidProblem, match="no name"):
        SizeTable(("max",), ())
