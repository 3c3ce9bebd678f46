"""Each solver says where it comes from, and the docs say the same."""

from pathlib import Path

from rekindle.solve import SOLVERS
from rekindle.solve.origins import ORIGINS

TESTS = Path(__file__).parents[2]
PAGE = TESTS.parent / "docs" / "papers.md"


def test_every_solver_has_one():
    assert set(ORIGINS) == {solver.name for solver in SOLVERS}


def test_the_named_tests_are_there_and_name_the_solver():
    for name, origin in ORIGINS.items():
        text = (TESTS / origin.test).read_text()
        word = {"rotor-floating": "floating", "keep-all": "KeepAll"}.get(name, name)
        assert word.lower().replace("-", "") in text.lower().replace("-", "").replace("_", ""), name


def test_the_page_has_them():
    text = PAGE.read_text()
    for name, origin in ORIGINS.items():
        row = (
            f"| `{name}` | {origin.paper} | {origin.ours} | {origin.corrected} | `{origin.test}` |"
        )
        assert row in text, row


def test_what_the_page_names_exists():
    text = PAGE.read_text()
    paths = {part for part in text.split("`") if part.startswith("benchmarks/") and " " not in part}
    assert len(paths) > 15
    for path in paths:
        assert (TESTS.parent / path).exists(), path
