"""The README's example works when pasted."""

import re
import runpy
from pathlib import Path

import pytest

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
