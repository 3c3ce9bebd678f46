"""`--help` of every command there is, as the parser itself lists them."""

import argparse
from collections.abc import Iterator

import pytest

from rekindle.cli import main
from rekindle.cli.entry import build_parser


def commands_of(parser: argparse.ArgumentParser, path: tuple[str, ...] = ()) -> Iterator[tuple]:
    """The paths of a parser and all parsers below it: (), ("solve",), ("cache", "info"), ..."""
    yield path
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, below in action.choices.items():
                yield from commands_of(below, (*path, name))


COMMANDS = tuple(commands_of(build_parser()))


def test_the_commands_are_found():
    assert {(), ("demo",), ("solve",), ("plan",), ("cache", "clear")} <= set(COMMANDS)


@pytest.mark.parametrize("option", ["--help", "-h"])
@pytest.mark.parametrize("path", COMMANDS, ids=lambda path: " ".join(path) or "rekindle")
def test_help(path, option, capsys):
    with pytest.raises(SystemExit) as end:
        main([*path, option])
    out, err = capsys.readouterr()
    assert (end.value.code, err) == (0, "")
    assert out.startswith(" ".join(("usage: rekindle", *path)))
    assert "--help" in out
