"""Releases of torch that are too old are refused with a sentence, before anything runs; newer ones
than the tested are tried at first use (see test_self_check.py)."""

import importlib
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from rekindle.core import write_problem
from rekindle.core.generate import chain
from rekindle.errors import RekindleError
from rekindle.supported_torch import (
    ANY_TORCH,
    NEWEST,
    OLDEST,
    installed_torch,
    missing_names_explained,
    must_be_tried,
    refuse_older,
    release_of,
)

ROOT = Path(__file__).parents[2]
SENTENCE = (
    "torch 2.10.2 is installed; this release of Rekindle is tested with 2.11 to 2.15, and older "
    "releases lack what it needs: pip install 'torch>=2.11,<2.16', or set REKINDLE_ANY_TORCH=1 to "
    "try at your own risk"
)
NEWER_RELEASE = "2.99.0"


def with_torch(release, folder):
    """The environment of a process where the metadata of torch tells this release."""
    info = folder / "other" / f"torch-{release}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {release}\n")
    path = os.pathsep.join([str(info.parent), *filter(None, sys.path)])
    return {k: v for k, v in os.environ.items() if k != ANY_TORCH} | {"PYTHONPATH": path}


@pytest.fixture
def older_torch(tmp_path):
    return with_torch("2.10.2", tmp_path)


@pytest.fixture
def newer_torch(tmp_path):
    return with_torch(NEWER_RELEASE, tmp_path)


@pytest.fixture(autouse=True)
def no_own_risk(monkeypatch):
    monkeypatch.delenv(ANY_TORCH, raising=False)


def run(environment, *command):
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, env=environment, check=False
    )


@pytest.mark.parametrize(
    "installed", ["2.11.0", "2.12.1+cu130", "2.13.0a0+git1234567", "2.15.0.dev20261101+cpu"]
)
def test_tested_releases(installed):
    refuse_older(installed)
    assert not must_be_tried(installed)


@pytest.mark.parametrize("installed", ["2.10.2", "1.13.1", "odd"])
def test_older_releases_are_refused(installed, monkeypatch):
    with pytest.raises(RekindleError, match="is installed; this release of Rekindle is tested"):
        refuse_older(installed)
    monkeypatch.setenv(ANY_TORCH, "1")
    refuse_older(installed)


@pytest.mark.parametrize("installed", ["2.16.0", "2.16.0.dev20270101+cpu", "3.0"])
def test_newer_releases_are_tried(installed, monkeypatch):
    refuse_older(installed)
    assert must_be_tried(installed)
    monkeypatch.setenv(ANY_TORCH, "1")
    assert not must_be_tried(installed)


def test_the_lower_bound_is_the_package_s():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert f"torch>={'.'.join(map(str, OLDEST))}" in project["dependencies"]
    refuse_older(installed_torch())


def test_the_matrix_has_the_oldest_and_the_newest(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    rows = importlib.import_module("matrix").ROWS
    assert [release_of(row.torch) for row in rows] == [OLDEST, NEWEST]


def test_the_metadata_tell_what_torch_tells():
    assert installed_torch().split("+")[0] == torch.__version__.split("+")[0]


@pytest.mark.parametrize("error", [ImportError("no _name"), AttributeError("no _name")])
def test_a_private_name_that_is_missing(error, monkeypatch):
    with pytest.raises(type(error)), missing_names_explained():
        raise error
    monkeypatch.setattr("rekindle.supported_torch.installed_torch", lambda: NEWER_RELEASE)
    with (
        pytest.raises(
            RekindleError, match=rf"torch {NEWER_RELEASE} .*lacks a name .*no _name.*<2\.16'"
        ),
        missing_names_explained(),
    ):
        raise error


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
def test_python_refuses(code, older_torch):
    assert f"rekindle.errors.RekindleError: {SENTENCE}" in run(older_torch, "-c", code).stderr


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
def test_commands_that_need_torch_refuse(command, older_torch, tmp_path):
    answer = subprocess.run(
        [sys.executable, "-m", "rekindle", *command],
        capture_output=True, text=True, env=older_torch, cwd=tmp_path, check=False,
    )  # fmt: skip
    assert (answer.returncode, answer.stdout) == (2, "")
    assert answer.stderr == f"rekindle: {SENTENCE}\n"


def test_commands_that_need_no_torch_work(older_torch, tmp_path):
    problem = tmp_path / "problem.json"
    write_problem(problem, chain(4))
    solved = run(older_torch, "-m", "rekindle", "solve", str(problem), "--budget", "1.0", "-q")
    assert solved.returncode == 0, solved.stderr
    assert run(older_torch, "-m", "rekindle", "demo", "--help").returncode == 0


def test_at_the_user_s_own_risk(older_torch):
    code = "import rekindle; rekindle.plan"
    assert run(older_torch | {ANY_TORCH: "1"}, "-c", code).returncode == 0


PLANS = """
import logging, torch, rekindle
logging.basicConfig(level="INFO", format="%(message)s")
model, x = torch.nn.Linear(4, 4), torch.randn(2, 4)
rekindle.plan(model, (x,), budget=1.0)
rekindle.plan(model, (x,), budget=1.0)
"""


def test_a_newer_release_is_tried_once(newer_torch):
    done = run(newer_torch, "-c", PLANS)
    assert done.returncode == 0, done.stderr
    said = "is newer than the tested releases (2.11 to 2.15); the self-check passes"
    assert done.stderr.count(f"torch {NEWER_RELEASE} {said}") == 1
