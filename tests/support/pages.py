"""The pages people read and the blocks of code on them.

Every block has a language. `python` and `bash` blocks run, from the top of a page to its end, as if
they were pasted one after the other into one session; `json` and `toml` are parsed; `text` is what
a program printed. A block that cannot run in the tests says so in its first line,
`# not run here: the reason`; it must still be a program.
"""

import os
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
NOT_RUN = "# not run here: "
LANGUAGES = ("python", "bash", "json", "toml", "text")
_BLOCK = re.compile(r"^( *)```([^\n]*)\n(.*?)^\1```$", re.M | re.S)


@dataclass(frozen=True, slots=True)
class Block:
    page: str
    line: int  # of the page, where the code starts
    language: str
    text: str

    @property
    def runs(self) -> bool:
        return not self.text.startswith(NOT_RUN)

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def page_names() -> list[str]:
    """README, CONTRIBUTING and every page of the documentation, by path from the root."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [str(page.relative_to(ROOT)) for page in pages]


def blocks_of(page: str) -> list[Block]:
    text = (ROOT / page).read_text(encoding="utf-8")
    return [
        Block(page, text.count("\n", 0, match.start(3)) + 1, match[2], _dedented(match))
        for match in _BLOCK.finditer(text)
    ]


def session(folder: Path) -> dict[str, str]:
    """The environment of a user: `rekindle` and `python` on the path, a cache of their own."""
    commands = folder / ".commands"
    commands.mkdir()
    for name, words in (("rekindle", "-m rekindle "), ("python", "")):
        script = commands / name
        script.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {words}"$@"\n')
        script.chmod(0o755)
    tests = ROOT / "tests"
    return os.environ | {
        "PATH": os.pathsep.join((str(commands), os.environ["PATH"])),
        "PYTHONPATH": os.pathsep.join(
            map(str, (ROOT / "src", tests / "support" / "page_session", tests))
        ),
        "REKINDLE_CACHE_DIR": str(folder / ".cache"),
    }


def _dedented(match: re.Match[str]) -> str:
    return re.sub(rf"^{match[1]}", "", match[3], flags=re.M)
