"""Nothing changed that was not meant to: `record.py` says how to see and how to record anew."""

import json

import pytest

from golden.record import FOLDER, differences, made, made_with

MOST_LINES = 60


@pytest.mark.parametrize("group", ["schedules", "captured", "fused", "commands"])
def test_it_is_as_recorded(group: str):
    lines = list(differences(group, made(group)))
    was = json.loads((FOLDER / f"{group}.json").read_text("utf-8"))["made_with"]
    assert not lines, "\n".join(
        [
            f"{len(lines)} lines differ (recorded with {was}, this is {made_with()}); "
            "`python tests/golden/record.py --raw FOLDER` here and in the old checkout, then "
            "`diff -r`, shows how; record anew what was meant to change",
            *lines[:MOST_LINES],
        ]
    )
