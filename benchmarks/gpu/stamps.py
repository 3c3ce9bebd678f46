"""When a stored result is of code that is no more."""

import functools
import hashlib
import json
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent


@functools.cache
def stamp(files: tuple[str, ...], device: str, small: bool, ours: bool) -> str:
    """Of all that a result depends on: torch, the device, these files beside this one, and all of
    Rekindle's own code where it is `ours`."""
    parts = [torch.__version__, device, str(small)]
    if device.startswith("cuda"):
        parts.append(torch.cuda.get_device_name())
    paths = [HERE / name for name in files]
    if ours:
        root = HERE.parent.parent
        paths += sorted((root / "src").rglob("*.py"))
        paths += sorted(f for f in (root / "cpp").rglob("*") if f.suffix in (".cpp", ".h"))
    parts += [path.read_text() for path in paths]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def is_stale(path: Path, stamped: str) -> bool:
    """There is no result, it is of other code, or it went wrong."""
    if not path.exists():
        return True
    record = json.loads(path.read_text())
    return record.get("stamp") != stamped or "error" in record
