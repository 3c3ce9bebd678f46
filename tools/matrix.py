"""Runs the CPU tests with the oldest supported torch, the newest and the pinned one, each with
another Python.

    make matrix                                # all three, all tests but the slow ones
    make matrix PYTEST_ARGS="tests/memory -x"  # passed on to pytest
    python3 tools/matrix.py --torch 2.15.0     # one of them

The oldest and the newest get environments of their own, `.venv-2.11.0` and `.venv-2.15.0`, kept for
the next time; the pinned one is the environment that this script runs in. On Linux, PyPI's torch
brings the CUDA packages: about 7 GB and some minutes per environment. An interpreter that is
missing is replaced by the one of this script, and that is said.
"""

import argparse
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from dist import find_pythons

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "build" / "matrix"


@dataclass(frozen=True, slots=True)
class Row:
    torch: str
    torchvision: str  # each is built for one torch
    python: tuple[int, int]


# As OLDEST and NEWEST of rekindle.supported_torch; the pinned torch, constraints.txt, lies between.
ROWS = (Row("2.11.0", "0.26.0", (3, 12)), Row("2.15.0", "0.29.2", (3, 13)))


def main() -> None:
    options = parse()
    results = []
    pinned = version("torch").split("+")[0]
    pythons = find_pythons([])
    for torch in [options.torch] if options.torch else [ROWS[0].torch, pinned, ROWS[1].torch]:
        row = next((row for row in ROWS if row.torch == torch), None)
        if row is None and torch != pinned:
            sys.exit(f"no row for torch {torch}; there are {[r.torch for r in ROWS]} and {pinned}")
        python = Path(sys.executable) if row is None else environment(row, pythons)
        since = time.monotonic()
        code = run_tests(python, options.workers, options.pytest_args)
        about = said(python, "import sys; print('%d.%d.%d' % sys.version_info[:3])")
        results.append((torch, about, code, time.monotonic() - since))
    print(f"\n{'torch':<10} {'Python':<10} {'tests':<8} minutes")
    for torch, about, code, taken_s in results:
        print(f"{torch:<10} {about:<10} {'failed' if code else 'passed':<8} {taken_s / 60:.1f}")
    sys.exit(any(code for _, _, code, _ in results))


def environment(row: Row, pythons: dict[tuple[int, int], Path]) -> Path:
    """The interpreter of this row's environment, with all that the tests need and the native module
    for its Python."""
    interpreter = pythons.get(row.python)
    if interpreter is None:
        wanted = ".".join(map(str, row.python))
        print(f"no Python {wanted} here: {sys.executable} takes its place for torch {row.torch}")
        interpreter = Path(sys.executable)
    folder = ROOT / f".venv-{row.torch}"
    python = folder / "bin" / "python"
    constraints, requirements = needs(row)
    asked = constraints + requirements
    ready = folder / ".ready"  # what was installed
    if not ready.exists() or ready.read_text() != asked:
        run(interpreter, "-m", "venv", "--clear", folder)
        WORK.mkdir(parents=True, exist_ok=True)
        pins = WORK / f"constraints-{row.torch}.txt"
        pins.write_text(constraints)
        listed = WORK / f"requirements-{row.torch}.txt"
        listed.write_text(requirements)
        pip = (python, "-m", "pip", "install", "-q", "--disable-pip-version-check", "-c", pins)
        run(*pip, "torch", "cmake", "ninja", "nanobind", "highspy", "numpy", "rich", "jinja2")
        run(*pip, "-r", listed)
        run(*pip, "--no-deps", "-r", "requirements-test-nodeps.txt")
        ready.write_text(asked)
    build = WORK / said(python, "import sys; print('native-%d.%d' % sys.version_info[:2])")
    tools = os.environ | {"PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}"}
    run("cmake", "-S", ".", "-B", build, "-G", "Ninja", f"-DPython_EXECUTABLE={python}", env=tools)
    run("cmake", "--build", build, env=tools)
    return python


def needs(row: Row) -> tuple[str, str]:
    """constraints.txt and requirements-test.txt with this row's torch and torchvision."""
    constraints = (ROOT / "constraints.txt").read_text("utf-8")
    requirements = (ROOT / "requirements-test.txt").read_text("utf-8")
    return (
        re.sub(r"^torch==.*$", f"torch=={row.torch}", constraints, flags=re.M),
        re.sub(r"^torchvision==.*$", f"torchvision=={row.torchvision}", requirements, flags=re.M),
    )


def run_tests(python: Path, workers: int, arguments: list[str]) -> int:
    pytest = (python, "-m", "pytest", "-n", workers, "-rs", "-m", "not slow and not gpu")
    env = os.environ | {
        "PYTHONPATH": str(ROOT / "src"),
        "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
    }
    words = [str(word) for word in (*pytest, *arguments)]
    print(f"\n{' '.join(words)}", flush=True)
    return subprocess.run(words, cwd=ROOT, env=env, check=False).returncode


def run(*command: object, env: dict[str, str] | None = None) -> None:
    words = [str(word) for word in command]
    print(" ".join(words), flush=True)
    if subprocess.run(words, cwd=ROOT, env=env, check=False).returncode:
        sys.exit(f"failed: {' '.join(words)}")


def said(python: Path, code: str) -> str:
    return subprocess.run(
        [python, "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--torch", help="one release alone")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("pytest_args", nargs="*", help="after --")
    return parser.parse_args()


if __name__ == "__main__":
    main()
