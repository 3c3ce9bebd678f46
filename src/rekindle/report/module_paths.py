"""Where ops stand in the model: module paths, and identical layers under one name.

A captured op is named `aten.mm.default#21 model.layers.0.mlp`: what is called, its number, the
module. In other problems a dotted name is taken as a path, and a backward op stands where the op
whose gradient it computes does.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rekindle.core import Problem

# As `program._op_name` writes them; module names may hold spaces and newlines.
_CAPTURED = re.compile(r"(?P<call>\S.*?)#\d+(?: (?P<module>.+))?", re.DOTALL)
_INDEX = re.compile(r"(.*?)(\d+)")


@dataclass(frozen=True, slots=True)
class Place:
    """Where an op runs: its module, and what is called there."""

    module: str  # dotted path; "" for the model itself
    call: str  # what runs there


def places(problem: Problem) -> tuple[Place, ...]:
    """Per op: where it stands."""
    found: list[Place] = []
    for op in problem.ops:
        match = _CAPTURED.fullmatch(op.name)
        if match is not None:
            found.append(Place(match["module"] or "", match["call"]))
        elif op.grad_of is not None and op.grad_of < len(found):
            module = found[op.grad_of].module
            found.append(Place(module, op.name.removeprefix(f"{module}.")))
        else:
            # `block0.attn.qkv` is the call `qkv` in `block0.attn`; `aten.mm.default` is a call.
            head, dot, tail = op.name.rpartition(".")
            named = bool(dot) and not op.name.startswith(("aten.", "prims."))
            found.append(Place(head, tail) if named else Place("", op.name))
    return tuple(found)


def shown(module: str) -> str:
    """A module path as a reader sees it."""
    return module or "(model)"


def numbered(name: str) -> tuple[str, int] | None:
    """`block12` -> ("block", 12); None for a name that does not end in a number."""
    match = _INDEX.fullmatch(name)
    # Longer digits are hashes, not positions, and `int` of thousands of digits raises.
    return (match[1], int(match[2])) if match is not None and len(match[2]) < 10 else None


def starred(module: str) -> str:
    """`h.3.mlp` -> `h.*.mlp`: the same for all identical layers."""
    parts = module.split(".")
    return ".".join(f"{found[0]}*" if (found := numbered(part)) else part for part in parts)


def ranges(numbers: Iterable[int]) -> str:
    """`0-3,5`."""
    pieces: list[list[int]] = []
    for n in sorted(set(numbers)):
        if pieces and n == pieces[-1][1] + 1:
            pieces[-1][1] = n
        else:
            pieces.append([n, n])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in pieces)


def joined_names(names: Sequence[str]) -> str:
    """Siblings that differ in their number, as one name: `0-3`, `block{0-3}`."""
    if len(names) == 1:
        return names[0]
    found = [numbered(name) for name in names]
    prefix = found[0][0] if found[0] else ""
    numbers = ranges(item[1] for item in found if item is not None)
    return f"{prefix}{{{numbers}}}" if prefix else numbers


def joined_modules(modules: Iterable[str]) -> str:
    """Modules that differ in numbers alone, as one path; a part that differs in a second place is
    a star."""
    rows = [module.split(".") for module in dict.fromkeys(modules)]
    if len({len(row) for row in rows}) != 1:
        return shown(starred(".".join(rows[0])))
    columns = [list(dict.fromkeys(column)) for column in zip(*rows, strict=True)]
    varying = [column for column in columns if len(column) > 1]
    parts = []
    for column in columns:
        if len(column) == 1:
            parts.append(column[0])
        elif len(varying) == 1 and all(numbered(name) for name in column):
            parts.append(joined_names(column))
        else:
            parts.append("*")
    return shown(".".join(parts))
