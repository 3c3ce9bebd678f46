"""benchmarks/gpu/bigger.py as a whole, on a CPU with a limit that is played."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "gpu" / "bigger.py"


def run(results: Path, *options: str) -> str:
    command = [
        sys.executable, str(SCRIPT), "--device", "cpu", "--small", "--results", str(results),
        "--cases", "unet:0.01+0.02", "--jobs", "1", "--plan-limit", "0.5", "--max-tries", "12",
        *options,
    ]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.slow
def test_every_method_and_nothing_twice(tmp_path: Path) -> None:
    said = run(tmp_path)
    sizes = {}
    for method in ("eager", "own", "rekindle"):
        for card in ("0.01", "0.02"):
            record = json.loads((tmp_path / f"unet.{method}.{card}.json").read_text())
            assert record["closed"], said
            assert record["final"]
            assert record["size"] < record["fails"] <= record["size"] + 4
            fitted = [t for t in record["tries"] if t["fits"]]
            assert all(t["peak_bytes"] <= float(card) * 2**30 for t in fitted)
            sizes[method, card] = record["size"]
    for card in ("0.01", "0.02"):
        assert sizes["eager", card] < sizes["own", card] < sizes["rekindle", card]
    assert run(tmp_path) == ""


TALKER = """
import sys
sys.stdin.readline()
print("a library speaks")
print('ANSWER {"size": 1, "final": false}')
print('ANSWER {"size": 2, "final": false}', flush=True)
sys.stdin.readline()
"""
ASKER = """
import subprocess, sys
sys.path.insert(0, sys.argv[1])
from bigger import ask
pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
with subprocess.Popen([sys.executable, "-c", sys.argv[2]], **pipes) as worker:
    print(ask(worker, 24, 2), ask(worker, 40, 2))
"""


def test_a_worker_that_is_stopped_leaves_what_it_found() -> None:
    # In a process of its own: the script's modules have names that tests have too.
    command = [sys.executable, "-c", ASKER, str(SCRIPT.parent), TALKER]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert said == "{'size': 2, 'final': False} None\n"


@pytest.mark.slow
def test_no_time_no_results(tmp_path: Path) -> None:
    assert "no time left" in run(tmp_path, "--deadline", "0.5", "--methods", "eager")
    assert not list(tmp_path.iterdir())
