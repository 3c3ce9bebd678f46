"""Releases of torch that are not supported are refused with a sentence, before anything runs."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from rekindle.core import write_problem
from rekindle.core.generate import chain
from rekindle.errors import RekindleError
from rekindle.supported_torch import ANY_TORCH, NEWEST, OLDEST, installed_torch, refuse_untested

ROOT = Path(__file__).parents[2]
SENTENCE = (
    "torch 2.15.0 is installed; this release of Rekindle is tested with 2.11 to 2.13, and newer "
    "releases can give wrong gradients without an error: pip install 'torch>=2.11,<2.14', or set "
    "REKINDLE_ANY_TORCH=1 to try at your own risk"
)


@pytest.fixture
def newer_torch(tmp_path):
    """The environment of a process where the metadata of torch says 2.15.0."""
    folder = tmp_path / "newer" / "torch-2.15.0.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.15.0\n")
    path = os.pathsep.join([str(folder.parent), *filter(None, sys.path)])
    return {k: v for k, v in os.environ.items() if k != ANY_TORCH} | {"PYTHONPATH": path}


def run(environment, *command):
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, env=environment, check=False
    )


@pytest.mark.parametrize("installed", ["2.11.0", "2.12.1+cu130", "2.13.0a0+git1234567"])
def test_supported(installed, monkeypatch):
    monkeypatch.delenv(ANY_TORCH, raising=False)
    refuse_untested(installed)


@pytest.mark.parametrize("installed", ["2.14.0", "2.15.0.dev20261101+cpu", "3.0", "2.10.2", "odd"])
def test_refused(installed, monkeypatch):
    monkeypatch.delenv(ANY_TORCH, raising=False)
    with pytest.raises(RekindleError, match="is installed; this release of Rekindle is tested"):
        refuse_untested(installed)
    monkeypatch.setenv(ANY_TORCH, "1")
    refuse_untested(installed)


def test_the_bounds_are_the_package_s():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    oldest, below = (".".join(map(str, b)) for b in (OLDEST, (NEWEST[0], NEWEST[1] + 1)))
    assert f"torch>={oldest},<{below}" in project["dependencies"]
    refuse_untested(installed_torch())


@pytest.mark.parametrize(
    "code",
    [
        "import rekindle; rekindle.plan",
        "import rekindle; rekindle.rematerialize",
        "import rekindle; rekindle.sequential",
        "import rekindle; rekindle.measure",
        "import rekindle; rekindle.verify",
        "import rekindle.integrate.dynamo",
        "import rekindle.integrate.distributed",
    ],
)
def test_python_refuses(code, newer_torch):
    assert f"rekindle.errors.RekindleError: {SENTENCE}" in run(newer_torch, "-c", code).stderr


@pytest.mark.parametrize(
    "command",
    [
        ("demo",),
        ("plan", "no.module:factory", "--budget", "0.5"),
        ("capture", "no.module:factory", "-o", "problem.json"),
        ("verify", "no.module:factory", "--budget", "0.5"),
    ],
    ids=lambda command: command[0],
)
def test_commands_that_need_torch_refuse(command, newer_torch, tmp_path):
    answer = subprocess.run(
        [sys.executable, "-m", "rekindle", *command],
        capture_output=True, text=True, env=newer_torch, cwd=tmp_path, check=False,
    )  # fmt: skip
    assert (answer.returncode, answer.stdout) == (2, "")
    assert answer.stderr == f"rekindle: {SENTENCE}\n"


def test_commands_that_need_no_torch_work(newer_torch, tmp_path):
    problem = tmp_path / "problem.json"
    write_problem(problem, chain(4))
    solved = run(newer_torch, "-m", "rekindle", "solve", str(problem), "--budget", "1.0", "-q")
    assert solved.returncode == 0, solved.stderr
    assert run(newer_torch, "-m", "rekindle", "demo", "--help").returncode == 0


def test_at_the_user_s_own_risk(newer_torch):
    code = "import rekindle; rekindle.plan"
    assert run(newer_torch | {ANY_TORCH: "1"}, "-c", code).returncode == 0
