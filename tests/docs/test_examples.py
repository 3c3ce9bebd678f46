"""The programs in examples/ run, and end by telling the loss and the peak."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.pages import ROOT, session

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
CASES = {
    "fine_tune_gpt.py": (0.5, "--steps 2 --batch 2 --length 64"),
    "train_unet.py": (0.6, "--steps 2 --batch 2 --size 32 --width 8"),
    "ddp.py": (0.7, "--steps 2 --batch 256 --width 32 --layers 3"),
}


def test_every_example_is_tested() -> None:
    assert sorted(CASES) == sorted(p.name for p in (ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize("name", CASES)
def test_example(name: str, tmp_path: Path) -> None:
    budget, options = CASES[name]
    options += f" --budget {budget} --time-limit 3"
    launch = TORCHRUN if name == "ddp.py" else ()
    done = subprocess.run(
        [sys.executable, *launch, ROOT / "examples" / name, *options.split()],
        cwd=tmp_path,
        env=session(tmp_path),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    last = done.stdout.strip().splitlines()[-1]
    said = re.match(
        r"loss ([\d.]+).*; measured peak [\d.]+ MiB of eager's [\d.]+ MiB \((\d+)%\)", last
    )
    assert said, last
    assert 0 < float(said[1]) < 20
    assert int(said[2]) <= 100 * budget + 1
