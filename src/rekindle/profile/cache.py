"""Measurements on disk, so that a second plan of a model measures nothing.

One file per environment (device, torch, CUDA and library versions, and the settings that pick
kernels), named by the hash of its record and opened by that record. Lines are JSON, each with a
checksum, only ever appended: a reader takes what is whole and passes over the rest, so a killed
writer costs at most its own line, and concurrent writers cost nothing. Never a pickle.

Where: the folder `profile` of `core.disk.cache_home`. A place that cannot be written is no error:
measurements are then not kept.
"""

import contextlib
import hashlib
import json
import os
import platform
import warnings
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rekindle.core.disk import cache_home
from rekindle.plans.plan_record import Source
from rekindle.profile.base import OpProfile
from rekindle.profile.block_sizes import expandable_segments

FORMAT = "rekindle.profile"
VERSION = 3  # measured in a step of the model, on true inputs
_SUFFIX = ".jsonl"


def cache_dir() -> Path:
    """The folder of measured costs."""
    return cache_home() / "profile"


def environment(device: torch.device) -> dict[str, Any]:
    """All that decides which kernels run and how fast, besides the op itself."""
    record: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "device": device_name(device),
        "torch": torch.__version__,
        # TF32 or not: another kernel, several times as fast.
        "float32_matmul": _setting(torch.get_float32_matmul_precision),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
    if device.type != "cuda":
        mkldnn = torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled
        return record | {"threads": torch.get_num_threads(), "mkldnn": bool(mkldnn)}
    cudnn = torch.backends.cudnn
    # A name is not enough: cards of one name have been sold with different memory.
    properties = torch.cuda.get_device_properties(device)
    return record | {
        "memory_bytes": properties.total_memory,
        "capability": list(torch.cuda.get_device_capability(device)),
        "cuda": torch.version.cuda,
        "cudnn": cudnn.version(),
        "cudnn_flags": [cudnn.enabled, cudnn.benchmark, cudnn.deterministic],
        "cudnn_tf32": _setting(lambda: cudnn.allow_tf32),
        "expandable_segments": expandable_segments(),
    }


def _setting(read: Callable[[], Any]) -> Any:
    """A setting of torch's old interface, which warns or refuses where the new one is in use."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return read()
        except RuntimeError:
            return "mixed"


def device_name(device: torch.device) -> str:
    """The name under which measurements of a device are kept."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    # `platform` knows the architecture alone on Linux.
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine() or "cpu"


class ProfileCache:
    """The measurements of one environment."""

    def __init__(self, record: Mapping[str, Any], directory: Path | None = None) -> None:
        self._record = dict(record)
        text = json.dumps(self._record, sort_keys=True, separators=(",", ":"))
        name = hashlib.sha256(text.encode()).hexdigest()[:24]
        self.path = (directory or cache_dir()) / f"{name}{_SUFFIX}"
        self._known: dict[str, OpProfile] | None = None

    def get(self, key: str) -> OpProfile | None:
        """The kept measurement of the op with that signature key."""
        if self._known is None:
            self._known = _read(self.path)
        return self._known.get(_short(key))

    def put(self, measured: Iterable[tuple[str, OpProfile]]) -> None:
        """Appends measurements; gives up in silence where nothing can be written."""
        lines = [
            _line({"key": _short(key), "op": json.loads(key)[0], **_numbers(op)})
            for key, op in measured
        ]
        self._append(lines)
        self._known = None

    def host_numbers(self) -> dict[str, Any] | None:
        """The kept measurement of the link to host memory, the last one, as it was given."""
        found = [record["host"] for record in _records(self.path) if "host" in record]
        return found[-1] if found and isinstance(found[-1], dict) else None

    def put_host_numbers(self, numbers: Mapping[str, Any]) -> None:
        """Appends a measurement of the link to host memory."""
        self._append([_line({"host": dict(numbers)})])

    def _append(self, lines: list[str]) -> None:
        if not lines:
            return
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # The empty line first: a writer killed in mid-line must not spoil what follows it.
            text = "\n" + "".join(lines)
            if not self.path.exists():
                text = _line({"environment": self._record}) + text
            # One write in append mode: the kernel puts it behind all that others have written.
            handle = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                data = text.encode()
                while data:
                    data = data[os.write(handle, data) :]
            finally:
                os.close(handle)


@dataclass(frozen=True, slots=True)
class CacheFile:
    """What one file of the cache holds."""

    path: Path
    device: str
    torch_version: str
    num_ops: int
    num_bytes: int


def cache_info(directory: Path | None = None) -> tuple[CacheFile, ...]:
    """What is kept, one entry per environment."""
    files = []
    for path in sorted((directory or cache_dir()).glob(f"*{_SUFFIX}")):
        with contextlib.suppress(OSError):
            record: dict[str, Any] = next(
                (e for r in _records(path) if isinstance(e := r.get("environment"), dict)),
                {},
            )
            files.append(
                CacheFile(
                    path=path,
                    device=str(record.get("device", "unknown")),
                    torch_version=str(record.get("torch", "unknown")),
                    num_ops=len(_read(path)),
                    num_bytes=path.stat().st_size,
                )
            )
    return tuple(files)


def cache_clear(directory: Path | None = None) -> int:
    """Removes all measurements; returns how many files that were."""
    removed = 0
    for path in (directory or cache_dir()).glob(f"*{_SUFFIX}"):
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
            removed += 1
    return removed


def _short(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def _numbers(op: OpProfile) -> dict[str, Any]:
    return {
        "device_ns": op.device_ns,
        "host_ns": op.host_ns,
        "cost_ns": op.cost_ns,
        "workspace_bytes": op.workspace_bytes,
        "output_bytes": list(op.output_bytes),
    }


def _line(record: dict[str, Any]) -> str:
    body = json.dumps(record, sort_keys=True, separators=(",", ":"))
    return f"{zlib.crc32(body.encode()):08x} {body}\n"


def _records(path: Path) -> Iterable[dict[str, Any]]:
    """Every whole line of the file; anything else is passed over."""
    try:
        data = path.read_bytes()
    except OSError:
        return
    for line in data.split(b"\n"):
        check, _, body = line.partition(b" ")
        if len(check) != 8 or check != f"{zlib.crc32(body):08x}".encode():
            continue
        with contextlib.suppress(ValueError, RecursionError):
            record = json.loads(body)
            if isinstance(record, dict):
                yield record


def _read(path: Path) -> dict[str, OpProfile]:
    known: dict[str, OpProfile] = {}
    for record in _records(path):
        with contextlib.suppress(KeyError, TypeError, ValueError):
            numbers = {k: record[k] for k in ("device_ns", "host_ns", "cost_ns", "workspace_bytes")}
            outputs = tuple(record["output_bytes"])
            # A line whose checksum is right may still be from a program that was not this one.
            # `type`, since True is an int.
            if all(type(n) is int and n >= 0 for n in (*numbers.values(), *outputs)):
                known[record["key"]] = OpProfile(
                    output_bytes=outputs, source=Source.CACHED, **numbers
                )
    return known
