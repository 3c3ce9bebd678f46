"""Golden `--json` of the commands: what machines read, without times and places.

What a search under a clock finds is on a problem so small that it is proven in milliseconds.
"""

import contextlib
import hashlib
import io
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rekindle.cli import main
from rekindle.core import read_problem, write_problem
from rekindle.core.files import problem_record
from rekindle.core.generate import random_problem

_VOLATILE = {
    "wall_s", "measured_ns", "measured_peak", "available", "message", "path", "solutions_path",
}  # fmt: skip
_FACTORY = f"{Path(__file__).parent / 'models.py'}:mlp"
_ESTIMATED = ("--device-profile", "cpu", "--json")
_COMMANDS: dict[str, tuple[str, ...]] = {
    "solvers": ("solvers", "--json"),
    "solve": ("solve", "small.json", "--budget", "0.9", "-o", "schedule.json", "--json"),
    "solve floor": ("solve", "small.json", "--budget", "0.9", "--solver", "floor", "--json"),
    "solve infeasible": ("solve", "small.json", "--budget", "1", "--json"),
    "check": ("check", "small.json", "schedule.json", "--budget", "0.9", "--json"),
    "check over": ("check", "small.json", "schedule.json", "--budget", "1", "--json"),
    "pareto": ("pareto", "small.json", "--points", "4", "--json"),
    "explain problem": ("explain", "small.json", "schedule.json", "--json"),
    "capture": ("capture", _FACTORY, "-o", "problem.json", *_ESTIMATED),
    "plan": (
        "plan", _FACTORY, "--budget", "0.7", "--solver", "floor", "-o", "plan.json", "--no-cache",
        *_ESTIMATED,
    ),
    "verify": ("verify", _FACTORY, "--plan", "plan.json", "--json"),
    "explain": ("explain", "plan.json", "--json"),
    "explain module": ("explain", "plan.json", "--module", "0", "--json"),
    "report": ("report", "plan.json", "--no-curve", "-o", "report.html", "--json"),
    "export memory-viz": (
        "export", "plan.json", "--format", "memory-viz", "-o", "step.pickle", "--json",
    ),
    "export chrome-trace": (
        "export", "plan.json", "--format", "chrome-trace", "-o", "step.json", "--json",
    ),
    "cache info": ("cache", "info", "--json"),
}  # fmt: skip
_FILES = ("schedule.json", "report.html", "step.pickle", "step.json")


def answers() -> dict[str, dict[str, Any]]:
    """Per command: the exit code and what it prints; and the files that they write."""
    items: dict[str, dict[str, Any]] = {}
    with _elsewhere():
        write_problem("small.json", random_problem(11, 10))
        for name, argv in _COMMANDS.items():
            code, text = _run(argv)
            items[name] = {"exit": code, "json": json.dumps(_steady(json.loads(text)), indent=1)}
        for name in _FILES:
            # Pages name the command that made them, and so where this checkout is.
            told = Path(name).read_bytes().replace(_FACTORY.encode(), b"models.py:mlp")
            items[f"file {name}"] = {"bytes": hashlib.sha256(told).hexdigest()}
        record = problem_record(read_problem("problem.json"))
        items["file problem.json"] = {"problem": json.dumps(record, indent=1)}
    return items


def _run(argv: Sequence[str]) -> tuple[int, str]:
    out = io.StringIO()
    before, sys.argv = sys.argv, ["rekindle", *(a.replace(_FACTORY, "models.py:mlp") for a in argv)]
    try:
        with contextlib.redirect_stdout(out):
            code = main(argv)
    finally:
        sys.argv = before
    return int(code), out.getvalue()


def _steady(record: Any) -> Any:
    if isinstance(record, dict):
        return {k: _steady(v) for k, v in record.items() if k not in _VOLATILE}
    return [_steady(item) for item in record] if isinstance(record, list) else record


@contextlib.contextmanager
def _elsewhere() -> Iterator[None]:
    """In a folder of its own, with nothing kept from earlier runs."""
    kept = os.environ.get("REKINDLE_CACHE_DIR")
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        os.environ["REKINDLE_CACHE_DIR"] = str(Path(folder) / "cache")
        try:
            yield
        finally:
            if kept is None:
                del os.environ["REKINDLE_CACHE_DIR"]
            else:
                os.environ["REKINDLE_CACHE_DIR"] = kept
