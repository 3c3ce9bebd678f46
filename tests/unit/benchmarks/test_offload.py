"""What the offloading benchmark keeps of its cases, and that its check can fail."""

import argparse
from pathlib import Path

import pytest
import torch
from support.benchmark_scripts import load_script

from rekindle.runtime.transfers import Moves

offload = load_script("gpu/offload.py")


def arguments(folder: Path) -> argparse.Namespace:
    return argparse.Namespace(
        device="cpu",
        small=True,
        steps=2,
        offload="host_budget 1GiB",
        records=folder / "records.jsonl",
        models=["m"],
    )


def test_records_are_kept_and_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = arguments(tmp_path)
    assert offload.stored(args) == {}
    for method, ms in (
        ("keep-all", 10.0),
        ("rekindle", 14.0),
        ("offload", 12.0),
        ("offload", 11.0),
    ):
        offload.store({"model": "m", "method": method, "ms": ms, "peak_bytes": 2**30}, args)
    offload.store({"model": "m", "method": "own", "error": "RuntimeError: no switch"}, args)
    assert offload.stored(args)["m", "offload"]["ms"] == 11.0
    offload.table(args)
    out = capsys.readouterr().out
    assert "removed 75 %" in out
    assert "RuntimeError: no switch" in out


@pytest.mark.parametrize("waits", [True, False])
def test_the_check(waits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not waits:  # what comes back is not what was sent
        fetch = Moves.fetch

        def other(self: Moves, slot: int) -> list[torch.Tensor]:
            return [tensor.add(1e-3) for tensor in fetch(self, slot)]

        monkeypatch.setattr(Moves, "fetch", other)
    try:
        record = offload.check(arguments(tmp_path))
    finally:
        torch.use_deterministic_algorithms(False)
    assert record["moved_bytes"] > 0
    assert record["wrong"] == (0 if waits else 2)
