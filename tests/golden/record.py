"""Golden replays: what fixed problems and models gave when this was recorded, and must still give.

    python tests/golden/record.py               records all groups anew, in tests/golden/*.json
    python tests/golden/record.py captured      one group (schedules, captured, fused, commands)
    python tests/golden/record.py --raw FOLDER  writes the full texts behind the hashes instead

A change that is to change nothing leaves them as they are (`test_golden.py`). Where one differs:
`--raw` in the old checkout and in the new one, then `diff -r` of the two folders, shows how. What
is meant to differ is recorded anew, and the commit says why. The GPU's own are in `gpu.py`.
"""

import argparse
import difflib
import hashlib
import json
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
_LONGEST = 100  # characters that are recorded as they are

Items = dict[str, dict[str, Any]]


def groups() -> dict[str, Callable[[], Items]]:
    """What makes the items of each group; imported late, since torch takes a while."""
    from golden import capturing, commands, solving

    return {
        "schedules": solving.schedules,
        "captured": capturing.plans,
        "fused": capturing.fused_plans,
        "commands": commands.answers,
    }


def made(group: str) -> Items:
    """The items of a group, in full."""
    import torch

    torch.manual_seed(0)
    return groups()[group]()


def condensed(items: Items) -> Items:
    """Long texts as hashes: short enough to keep, and to see at a glance which differ."""
    return {
        key: {field: _short(value) for field, value in item.items()} for key, item in items.items()
    }


def _short(value: Any) -> Any:
    text = value if isinstance(value, str) else json.dumps(value)
    if len(text) <= _LONGEST and "\n" not in text:
        return value
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()[:24]


def readable(group: str, items: Items) -> dict[str, str]:
    """The code that is kept as text, by the name of its file."""
    from golden.capturing import READABLE

    if group not in ("captured", "fused"):
        return {}
    return {
        f"{group}-{key.replace('/', '-')}.txt": items[key]["code"]
        for key in READABLE
        if key in items
    }


def recorded(group: str) -> Items:
    """The items of a group as they were recorded."""
    record: Items = json.loads((FOLDER / f"{group}.json").read_text("utf-8"))["items"]
    return record


def differences(group: str, items: Items) -> Iterator[str]:
    """A line for each field that is not as recorded, and the diff of code that is kept as text."""
    old, new = recorded(group), condensed(items)
    for key in dict.fromkeys((*old, *new)):
        before, after = old.get(key, {}), new.get(key, {})
        for field in dict.fromkeys((*before, *after)):
            if before.get(field) != after.get(field):
                yield f"{group}: {key}: {field}: {before.get(field)} -> {after.get(field)}"
    for name, text in readable(group, items).items():
        was = (FOLDER / name).read_text("utf-8").splitlines()
        yield from difflib.unified_diff(was, text.splitlines(), name, "now", lineterm="", n=1)


def made_with() -> dict[str, str]:
    """The releases that a recording depends on."""
    import torch

    return {
        "python": ".".join(map(str, sys.version_info[:2])),
        "torch": torch.__version__.split("+")[0],
    }


def write(group: str, items: Items) -> None:
    lines = [f" {json.dumps(key)}: {json.dumps(item)}" for key, item in condensed(items).items()]
    head = json.dumps(made_with())
    text = f'{{"made_with": {head}, "items": {{\n' + ",\n".join(lines) + "\n}}\n"
    (FOLDER / f"{group}.json").write_text(text, "utf-8")
    for name, code in readable(group, items).items():
        (FOLDER / name).write_text(code, "utf-8")


def write_raw(folder: Path, group: str, items: Items) -> None:
    for key, item in items.items():
        target = folder / group / key.replace("/", "-")
        target.mkdir(parents=True, exist_ok=True)
        for field, value in item.items():
            text = value if isinstance(value, str) else json.dumps(value)
            (target / f"{field}.txt").write_text(text + "\n", "utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("groups", nargs="*", help="default: all")
    parser.add_argument("--raw", type=Path, metavar="FOLDER", help="full texts, into this folder")
    arguments = parser.parse_args()
    known = groups()
    for group in arguments.groups or known:
        if group not in known:
            parser.error(f"no group {group!r}; there are {', '.join(known)}")
        items = made(group)
        if arguments.raw is not None:
            write_raw(arguments.raw, group, items)
        else:
            write(group, items)
        print(f"{group}: {len(items)} items")
    return 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.path[:0] = [str(FOLDER.parent), str(FOLDER.parent.parent / "src")]
    from support import torchvision_on_cpu

    torchvision_on_cpu.install()
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as cache:
        os.environ["REKINDLE_CACHE_DIR"] = cache
        sys.exit(main())
