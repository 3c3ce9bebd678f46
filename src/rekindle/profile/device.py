"""Device descriptions: what an estimate needs to know of a device, from a small TOML.

Shipped: a100, h100, h200, rtx4090, cpu (`devices.toml`). An own file holds one or more tables of
the same fields; a table may start from a shipped one with `like = "h100"`.
"""

import tomllib
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from rekindle.errors import DeviceProfileError, brief, no_such
from rekindle.profile.host_rates import HostRates

_RATES = ("float64", "float32", "tf32", "float16", "bfloat16")
_EFFICIENCIES = ("matmul", "convolution", "attention", "memory")
_INTEGERS = ("memory_bytes", "launch_ns", "host_ns", "view_ns", "block_bytes")
_TABLES = ("flops", "efficiency")
_KEYS = {"title", "kind", "bandwidth", *_TABLES, *_INTEGERS}
_HOST_INTEGERS = ("to_host", "from_host", "latency_ns", "least_bytes")
_HOST_SLOWDOWNS = ("memory_slowdown", "compute_slowdown")
_FASTEST = 1e30  # bytes or operations a second: beyond it, every op would take no time at all


@dataclass(frozen=True, slots=True)
class DeviceDescription:
    """What estimates are made from: the rates and overheads of a device."""

    name: str
    title: str
    kind: str  # "cuda" or "cpu"
    memory_bytes: int
    bandwidth: float  # bytes per second
    flops: tuple[tuple[str, float], ...]  # per second, by dtype
    efficiency: tuple[tuple[str, float], ...]  # of the rates above, by kind of work
    launch_ns: int
    host_ns: int
    view_ns: int
    block_bytes: int
    host: HostRates | None = None  # the link to host memory, where the description has it

    def rate(self, dtype: str) -> float:
        """FLOP per second for a dtype; one that is not listed counts as float32."""
        rates = dict(self.flops)
        return rates.get(dtype, rates["float32"])

    def share(self, work: str) -> float:
        return dict(self.efficiency)[work]


def device_names() -> tuple[str, ...]:
    """The shipped descriptions."""
    return tuple(_shipped())


def load_device(name_or_path: str | Path) -> DeviceDescription:
    """A shipped description by name, or the first table of a TOML file (`FILE.toml:NAME`: that)."""
    text = str(name_or_path)
    shipped = _shipped()
    if text.lower() in shipped:
        return _parse(text.lower(), shipped[text.lower()], shipped)
    path, _, table = text.partition(".toml")
    if not text.endswith(".toml") and not table.startswith(":"):
        raise DeviceProfileError(
            f"{no_such('device description', text, shipped)}; an own one is given as the path of "
            "a TOML file with the same fields"
        )
    tables = _read(Path(path + ".toml"))
    name = table[1:] or next(iter(tables), "")
    if name not in tables:
        raise DeviceProfileError(
            f"{path}.toml has no table {name!r}; it has {', '.join(tables) or 'none'}"
        )
    return _parse(name, tables[name], shipped | tables)


def _shipped() -> dict[str, Any]:
    return tomllib.loads(resources.files(__package__).joinpath("devices.toml").read_text("utf-8"))


def _read(path: Path) -> dict[str, Any]:
    try:
        tables = tomllib.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:  # ValueError: no UTF-8, no TOML, too many digits
        raise DeviceProfileError(f"cannot read the device description {path}: {error}") from None
    except RecursionError:
        raise DeviceProfileError(f"{path} is not understood: it is nested too deeply") from None
    return {k: v for k, v in tables.items() if isinstance(v, dict)}


def _parse(name: str, table: dict[str, Any], tables: dict[str, Any]) -> DeviceDescription:
    table = dict(table)
    like = table.pop("like", None)
    if like is not None:
        base = tables.get(like, {}) if isinstance(like, str) and like != name else {}
        if "like" in base or not all(isinstance(base.get(key), dict) for key in _TABLES):
            raise _bad(name, f"like = {brief(like)!r} names no complete description")
        for key in _TABLES:
            if not isinstance(table.setdefault(key, {}), dict):
                raise _bad(name, f"{key} is a table, not {brief(table[key])!r}")
        # Tables within the table are joined key by key, all else is replaced.
        table = {**base, **table, **{key: base[key] | table[key] for key in _TABLES}}
    host = table.pop("host", None)
    # Exactly these: a field that is misspelt must not be a field that is missing.
    if table.keys() != _KEYS:
        missing, unknown = _KEYS - table.keys(), table.keys() - _KEYS
        raise _bad(name, f"missing {brief(sorted(missing), 200)}, unknown {brief(sorted(unknown))}")
    if table["kind"] not in ("cuda", "cpu"):
        raise _bad(name, f'kind is "cuda" or "cpu", not {brief(table["kind"])!r}')
    for key in _INTEGERS:
        if type(table[key]) is not int or table[key] < (1 if key.endswith("_bytes") else 0):
            raise _bad(name, f"{key} is a whole number, not {brief(table[key])}")
    flops, efficiency = table["flops"], table["efficiency"]
    _check_rates(name, "flops", flops, _RATES)
    _check_rates(name, "efficiency", efficiency, _EFFICIENCIES)
    _check_rates(name, "", {"bandwidth": table["bandwidth"]}, ("bandwidth",))
    if max(efficiency.values()) > 1:
        raise _bad(name, "an efficiency is a share, above 0 and at most 1")
    return DeviceDescription(
        name=name,
        title=str(table["title"]),
        kind=table["kind"],
        bandwidth=float(table["bandwidth"]),
        flops=tuple(sorted((k, float(v)) for k, v in flops.items())),
        efficiency=tuple(sorted((k, float(v)) for k, v in efficiency.items())),
        **{key: table[key] for key in _INTEGERS},
        host=None if host is None else _host_rates(name, host, table["kind"]),
    )


def _host_rates(name: str, host: Any, kind: str) -> HostRates:
    _check_rates(name, "host", host, (*_HOST_INTEGERS, *_HOST_SLOWDOWNS), least=0)
    for key in _HOST_INTEGERS:
        if type(host[key]) is not int or host[key] < 1:
            raise _bad(name, f"host {key} is a whole number above 0, not {brief(host[key])}")
    return HostRates(
        **{key: host[key] for key in _HOST_INTEGERS},
        memory_slowdown=float(host["memory_slowdown"]),
        compute_slowdown=float(host["compute_slowdown"]),
        overlaps=kind == "cuda",
    )


def _check_rates(
    name: str, field: str, rates: Any, expected: tuple[str, ...], least: float | None = None
) -> None:
    if not isinstance(rates, dict) or set(rates) != set(expected):
        raise _bad(name, f"{field} has exactly the keys {', '.join(expected)}")
    for key, value in rates.items():
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        in_range = number and (0 < value < _FASTEST if least is None else least <= value < _FASTEST)
        if not in_range:
            above = "a number above 0" if least is None else f"a number from {least} on"
            raise _bad(name, f"{field} {key} is {above}, not {brief(value)}")


def _bad(name: str, what: str) -> DeviceProfileError:
    return DeviceProfileError(f"device description {name!r}: {what}")
