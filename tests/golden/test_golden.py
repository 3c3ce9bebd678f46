"""Nothing changed that was not meant to: `record.py` says how to see and how to record anew."""

import json
from pathlib import Path

import pytest

from golden.record import FOLDER, differences, made, made_with

MOST_LINES = 60
OF_TORCH = ("captured", "fused", "commands")


def recorded_with(group: str) -> dict[str, str]:
    return json.loads((FOLDER / f"{group}.json").read_text("utf-8"))["made_with"]


@pytest.mark.parametrize("group", OF_TORCH)
def test_it_is_recorded_with_the_pinned_torch(group: str):
    pins = (Path(__file__).parents[2] / "constraints.txt").read_text("utf-8").split()
    assert f"torch=={recorded_with(group)['torch']}" in pins


@pytest.mark.parametrize("group", ["schedules", "captured", "fused", "commands"])
def test_it_is_as_recorded(group: str):
    was = recorded_with(group)
    if group in OF_TORCH and was["torch"] != made_with()["torch"]:
        pytest.skip(f"recorded with torch {was['torch']}; another release runs other ops")
    lines = list(differences(group, made(group)))
    assert not lines, "\n".join(
        [
            f"{len(lines)} lines differ (recorded with {was}, this is {made_with()}); "
            "`python tests/golden/record.py --raw FOLDER` here and in the old checkout, then "
            "`diff -r`, shows how; record anew what was meant to change",
            *lines[:MOST_LINES],
        ]
    )
