"""Patterns that name ops of a problem: by the module they belong to, by what they call, or by both.

An op's name is what capture has given it: its calls and its module path. The patterns are those of
file names, and matched by case.
"""

from collections.abc import Iterable
from fnmatch import fnmatchcase


def parts_of(name: str) -> tuple[tuple[str, ...], str]:
    """An op's calls and module path, from its name: "aten.mm.default#3 blocks.0.mlp"."""
    calls, _, rest = name.partition("#")
    return tuple(calls.split("+")), rest.partition(" ")[2]


def matches(pattern: str, name: str) -> bool:
    """Whether a pattern means an op: a module path ("blocks.*.mlp", what lies inside included), an
    op ("aten.mm*", "mm"), or both as "path::op". `*`, `?` and `[...]` as in file names."""
    calls, path = parts_of(name)
    where, double, what = pattern.partition("::")
    if double:
        return _is_path(where.strip() or "*", path) and _is_call(what.strip() or "*", calls)
    return _is_path(pattern, path) or _is_call(pattern, calls)


def _is_path(pattern: str, path: str) -> bool:
    names = path.split(".") if path else []
    return any(fnmatchcase(".".join(names[:k]), pattern) for k in range(1, len(names) + 1)) or (
        pattern == "*"
    )


def _is_call(pattern: str, calls: Iterable[str]) -> bool:
    # What the pattern would be inside the name of a fused kernel: "aten.mul*" is "mul" there.
    # Nothing is left of a pattern of wildcards, and then it means no kernel.
    inside = pattern.removeprefix("aten.").partition(".")[0].rstrip("*")
    for call in calls:
        if call.startswith("fused_"):  # one kernel for several ops: named after all of them
            if inside and fnmatchcase(call, f"fused*_{inside}_*"):
                return True
            continue
        # "aten.mm.default" is "mm" for whoever writes patterns by hand.
        short = call.split(".")[1] if call.count(".") >= 2 else call
        if fnmatchcase(call, pattern) or fnmatchcase(short, pattern):
            return True
    return False
