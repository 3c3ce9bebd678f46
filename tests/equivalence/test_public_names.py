"""The README's example works when pasted; the public names do what they say."""

import re
import runpy
from pathlib import Path

import pytest
import torch
from torch import nn

import rekindle

README = Path(__file__).parents[2] / "README.md"


def test_the_example_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("REKINDLE_CACHE_DIR", str(tmp_path / "cache"))
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    complete = [block for block in blocks if "import torch" in block]
    assert len(complete) == 1
    script = tmp_path / "example.py"
    script.write_text(complete[0])
    runpy.run_path(str(script))
    first, last = capsys.readouterr().out.splitlines()
    peak, keep_all_peak, overhead, *_ = first.split()
    assert int(peak) <= 0.7 * int(keep_all_peak)
    assert 0 < float(overhead) < 0.3
    assert last == "True"


def test_a_plan_tells_its_curve() -> None:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)])
    plan = rekindle.plan(model, args=(torch.randn(64, 16),), budget=1.0, profile="estimate")
    curve = plan.pareto(num_points=4, time_limit_s=4.0)
    assert curve[-1].peak == plan.keep_all_peak_bytes
    assert curve[0].peak < plan.keep_all_peak_bytes
    assert [p.cost for p in curve] == sorted((p.cost for p in curve), reverse=True)


def test_sequential_is_public() -> None:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)])
    x = torch.randn(64, 16)
    managed = rekindle.sequential(model, x, budget=1.0)
    assert torch.equal(managed(x), model(x))
