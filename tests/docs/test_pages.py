"""The site builds without a warning, links lead somewhere, and pages that are made from other files
are what those files say."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from support.pages import ROOT, page_names

MADE = runpy.run_path(str(ROOT / "tools" / "reference.py"))["PAGES"]


@pytest.mark.parametrize("page", MADE)
def test_made_pages_are_up_to_date(page: str) -> None:
    """If this fails: `make reference`."""
    assert (ROOT / page).read_text(encoding="utf-8") == MADE[page]()


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", str(tmp_path)],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    page = (tmp_path / "getting-started" / "index.html").read_text(encoding="utf-8")
    # Nothing is fetched from elsewhere: the site can be read offline.
    assert not re.findall(r'<(?:script|link)[^>]+(?:src|href)="(?:https?:)?//(?!localhost)', page)


@pytest.mark.parametrize("page", ["CHANGELOG.md", "benchmarks/README.md", *page_names()])
def test_links_lead_somewhere(page: str) -> None:
    """Files and headings; mkdocs does not look at the README."""
    text = re.sub(r"```.*?```", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        file, _, anchor = target.partition("#")
        found = (ROOT / page).parent / file if file else ROOT / page
        assert found.exists(), f"{page}: {target}"
        assert not anchor or anchor in anchors(found), f"{page}: {target}"


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", h.lower()).strip().replace(" ", "-") for h in headings}
