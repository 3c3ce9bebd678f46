"""What the architecture page says that its blocks print is what they print."""

import contextlib
import io

import pytest
import torch
from support.pages import Block, blocks_of

PAGE = "docs/architecture.md"
MADE_WITH = (2, 13)  # another release of torch may capture other ops


def test_what_is_printed_is_as_the_page_has_it(tmp_path, monkeypatch) -> None:
    if tuple(map(int, torch.__version__.split(".")[:2])) != MADE_WITH:
        pytest.skip(f"the page was made with torch {MADE_WITH}")
    monkeypatch.setenv("REKINDLE_CACHE_DIR", str(tmp_path))
    names: dict = {"__name__": "__main__"}
    printed, num_compared = "", 0
    for block in blocks_of(PAGE):
        if block.language == "python":
            assert not printed, f"{block}: what the block before prints is not shown"
            printed = _run(block, names)
        elif printed:
            assert block.text == printed, str(block)
            printed = ""
            num_compared += 1
    assert num_compared >= 9  # one per stage


def _run(block: Block, names: dict) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(block.text, str(block), "exec"), names)
    lines = [line.rstrip() for line in out.getvalue().strip("\n").splitlines()]
    return "\n".join(lines) + "\n" if lines else ""
