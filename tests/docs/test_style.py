"""Pages, help, messages and comments use the field's words: phrases that only the project would use
stay out."""

import argparse
import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.pages import ROOT, page_names

from rekindle.cli.entry import build_parser

# What not to write, and what to write instead. Case does not matter; a space matches line breaks.
INSTEAD = {
    r"(own )?block switch(es)?": "gradient checkpointing",
    r"own switch": "gradient checkpointing",
    r"tensors without data": "fake tensors",
    r"eager's bits|the bits of (the )?(eager|separate)": "bitwise identical",
    r"(have|has|gives?) the bits|to the bit": "bitwise identical",
    r"(make|makes|made|making) (\w+ )?again": "recompute",
    r"made anew": "planned again, recomputed",
    r"(is|are) told": "logged, passed, given",
    r"what there is": "name the thing",
    r"of which code": "a table: Provenance",
    r"own word": "force modules to be saved or recomputed",
    r"the answer is no": "check or verification failed",
    r"no way of checkpointing": "no checkpointing baseline",
    r"in \d+ of \d+ cases": "in N of M settings",
    r"that any is, is unproven": "optimality gap",
    r"(is|are) believed": "checked",
    r"rounded? otherwise": "differs in the last bits",
    r"beside the peers": "against the baselines",
    r"as it stands": "as it is",
    r"takes it that": "assumes that",
    r"compute again": "recompute",
}
SOURCE = ROOT / "src" / "rekindle"
PAGES = sorted(
    {
        *page_names(),
        "CHANGELOG.md",
        *(str(p.relative_to(ROOT)) for p in (ROOT / "benchmarks").rglob("*.md")),
    }
)


@pytest.mark.parametrize("page", PAGES)
def test_a_page_has_no_private_words(page: str) -> None:
    assert found_in((ROOT / page).read_text(encoding="utf-8")) == []


def test_help_has_no_private_words() -> None:
    found = {name: found_in(text) for name, text in helps(build_parser(), "rekindle")}
    assert {name: words for name, words in found.items() if words} == {}


@pytest.mark.parametrize("room", sorted(p.name for p in SOURCE.iterdir() if p.is_dir()))
def test_messages_and_comments_have_no_private_words(room: str) -> None:
    paths = [p for p in sorted((SOURCE / room).rglob("*")) if p.suffix in (".py", ".html", ".js")]
    assert {str(p): words for p in paths if (words := found_in(prose_of(p)))} == {}


def test_the_other_sources_have_none() -> None:
    paths = [*sorted(SOURCE.glob("*.py")), *sorted((ROOT / "cpp").rglob("*.[ch]*"))]
    assert {str(p): words for p in paths if (words := found_in(prose_of(p)))} == {}


def test_prose_is_read_across_lines(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text('x = f"made {y} again"  # made\nagain: int\n# is\n# told\n')
    assert found_in(prose_of(tmp_path / "a.py")) == ["'is told': write logged, passed, given"]
    (tmp_path / "b.cpp").write_text("int made; // what\n  // there is\n")
    assert len(found_in(prose_of(tmp_path / "b.cpp"))) == 1


def test_the_words_are_found() -> None:
    text = "Recomputed values are\nmade again; No way of checkpointing is smaller."
    assert found_in(text) == [
        "'made again': write recompute",
        "'No way of checkpointing': write no checkpointing baseline",
    ]


def found_in(text: str) -> list[str]:
    return [
        f"{' '.join(match[0].split())!r}: write {better}"
        for pattern, better in INSTEAD.items()
        for match in re.finditer(rf"\b(?:{pattern.replace(' ', chr(92) + 's+')})", text, re.I)
    ]


def prose_of(path: Path) -> str:
    """What a source file says to people: comments and strings of Python; all of another file."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        return re.sub(r"\n\s*//", "\n", text)
    strings = (node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant))
    said = [value for value in strings if isinstance(value, str)]
    last_row = -1
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.COMMENT:
            continue
        words, row = token.string.lstrip("# "), token.start[0]
        if row == last_row + 1:  # a sentence may go on
            said[-1] += f" {words}"
        else:
            said.append(words)
        last_row = row
    return "\0".join(said)


def helps(parser: argparse.ArgumentParser, name: str) -> Iterator[tuple[str, str]]:
    yield name, parser.format_help()
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for word, below in action.choices.items():
                yield from helps(below, f"{name} {word}")
