"""benchmarks/gpu/compare.py as a whole, on a CPU with small models."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "gpu" / "compare.py"


def run(results: Path, *options: str) -> str:
    command = [
        sys.executable, str(SCRIPT), "--device", "cpu", "--small", "--results", str(results),
        "--models", "unet", "--methods", "rekindle@0.7,eager", "--repeats", "1",
        "--plan-limit", "0.5", *options,
    ]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_each_case_once_and_what_budgets_are_taken_from_first(tmp_path: Path) -> None:
    said = run(tmp_path, "--jobs", "2").splitlines()
    assert [line.split()[1] for line in said] == ["eager", "rekindle@0.7"]
    records = {
        method: json.loads((tmp_path / f"unet.{method}.json").read_text())
        for method in ("eager", "rekindle@0.7")
    }
    assert all(record["ms"] > 0 for record in records.values())
    ours = records["rekindle@0.7"]
    assert ours["gradient_error"] == ours["eager_to_itself"] == 0
    assert ours["predicted_peak_bytes"] <= ours["budget_bytes"]
    assert run(tmp_path) == ""  # all of it is stored

    stale = tmp_path / "unet.eager.json"
    stale.write_text(json.dumps(records["eager"] | {"stamp": "of other code"}))
    assert [line.split()[1] for line in run(tmp_path, "--together").splitlines()] == ["eager"]


def test_nothing_is_begun_after_the_deadline(tmp_path: Path) -> None:
    assert run(tmp_path, "--deadline", "0") == ""
    assert not list(tmp_path.iterdir())
