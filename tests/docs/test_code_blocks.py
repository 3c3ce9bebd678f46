"""Every block of code in the README and the documentation runs as it stands."""

import json
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from support.pages import LANGUAGES, NOT_RUN, ROOT, Block, blocks_of, page_names, session

from rekindle.cli.entry import build_parser

PAGES = page_names()
ALL = [block for page in PAGES for block in blocks_of(page)]
RUNNER = ROOT / "tests" / "support" / "run_page.py"


def programs(page: str) -> list[Block]:
    return [b for b in blocks_of(page) if b.language in ("python", "bash") and b.runs]


@pytest.mark.parametrize("page", [page for page in PAGES if programs(page)])
def test_the_blocks_of_a_page_run_in_order(page: str, tmp_path: Path) -> None:
    blocks = [{"language": b.language, "name": str(b), "text": b.text} for b in programs(page)]
    for folder in ("examples", "tests/instances"):  # what a page may name, as from a clone
        shutil.copytree(ROOT / folder, tmp_path / folder)
    done = subprocess.run(
        [sys.executable, RUNNER],
        input=json.dumps(blocks),
        cwd=tmp_path,
        env=session(tmp_path),
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


@pytest.mark.parametrize("block", ALL, ids=str)
def test_a_block_is_what_it_says(block: Block) -> None:
    assert block.language in LANGUAGES, f"{block}: a block has one of the languages {LANGUAGES}"
    match block.language:
        case "python":
            compile(block.text, str(block), "exec")
        case "bash":
            subprocess.run(["bash", "-n", "-c", block.text], check=True)
            for line in block.text.replace("\\\n", " ").splitlines():
                check_command(line, block)
        case "json":
            json.loads(block.text)
        case "toml":
            tomllib.loads(block.text)


def check_command(line: str, block: Block) -> None:
    """A command of ours that does not run here must at least be one that exists."""
    words = shlex.split(line, comments=True)
    if words[:1] == ["rekindle"] and not block.runs and "|" not in words:
        arguments = build_parser().parse_args(words[1:])
        assert callable(arguments.run)


def test_what_does_not_run_says_why() -> None:
    unrun = [b for b in ALL if b.language in ("python", "bash") and not b.runs]
    assert all(len(b.text.splitlines()[0]) > len(NOT_RUN) + 8 for b in unrun)
    pythons = [b for b in ALL if b.language == "python"]
    # A convention for exceptions must not become the rule.
    assert sum(not b.runs for b in pythons) <= len(pythons) // 4
