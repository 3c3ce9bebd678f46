"""The table by module: what each saves and recomputes, and why; identical layers in one row.

Siblings whose names differ in a number alone (`h.0`, `h.1`, ...) are identical where their forward
ops are: the same calls with outputs of the same sizes. They share a row where the plan treats them
the same way, too; where it treats them in more than a few ways, one row stands for all.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from rekindle.report import format
from rekindle.report.account import Account
from rekindle.report.module_paths import joined_names, numbered, shown

MAX_WAYS = 4  # rows that identical layers may take where the plan treats them differently
MAX_ROWS = 300  # of the page: thousands of rows make a browser slow
OWN = "(not in a submodule)"
GIB = 2**30


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table by module: a module, or several identical ones."""

    label: str  # relative to the row above it that it is part of
    path: str
    depth: int
    num_modules: int  # how many identical modules the row stands for
    num_ops: int
    saved: int
    keep_all_saved: int
    num_recomputed: int  # runs beyond the first
    extra_cost: int
    why: str


@dataclass(slots=True)
class _Module:
    name: str
    path: str
    own: list[int] = field(default_factory=list)
    children: dict[str, "_Module"] = field(default_factory=dict)

    def ops(self) -> Iterator[int]:
        yield from self.own
        for child in self.children.values():
            yield from child.ops()


def module_rows(account: Account) -> tuple[Row, ...]:
    """The whole model first, then its parts, each below what it is part of."""
    root = _tree(account)
    ways = _Ways(account)  # shared by all depths: what a module is does not depend on the cut
    # By whole levels: a cut in the middle of one would show half of a module's parts.
    for depth in range(12, 0, -1):
        rows = list(_rows(account, ways, [root], shown(""), "", 0, depth))
        if len(rows) <= MAX_ROWS:
            break
    return tuple(rows[:MAX_ROWS])


def _tree(account: Account) -> _Module:
    root = _Module("", "")
    for op_id, place in enumerate(account.places):
        node = root
        for name in place.module.split(".") if place.module else ():
            path = f"{node.path}.{name}" if node.path else name
            node = node.children.setdefault(name, _Module(name, path))
        node.own.append(op_id)
    return root


class _Ways:
    """What makes two modules the same, and what makes a plan treat them the same way."""

    def __init__(self, account: Account) -> None:
        self.account = account
        self._kept: dict[str, tuple[object, object]] = {}

    def of(self, module: _Module) -> tuple[object, object]:
        if module.path not in self._kept:
            self._kept[module.path] = self._find(module)
        return self._kept[module.path]

    def _find(self, module: _Module) -> tuple[object, object]:
        account, problem = self.account, self.account.problem
        shape, way = [], []
        for op_id in module.ops():
            op, place = problem.ops[op_id], account.places[op_id]
            # Equal layers may differ in the backward: the first one needs no gradient of its input.
            if op.phase == "backward":
                continue
            sizes = tuple(problem.values[v].size for v in op.outputs)
            shape.append((place.module[len(module.path) :], place.call, sizes))
            way.append((account.trace.runs[op_id], account.saved[op_id], account.sent[op_id]))
        # Hashes, since the tuples of a module repeat those of its parts at every depth.
        return hash(tuple(shape)), hash(tuple(way))


def _rows(
    account: Account,
    ways: _Ways,
    modules: Sequence[_Module],
    label: str,
    path: str,
    depth: int,
    max_depth: int,
) -> Iterator[Row]:
    """The row of identical modules and, below it, those of their parts."""
    modules, label, path = _without_shells(modules, label, path)
    yield _row(account, [i for m in modules for i in m.ops()], label, path, depth, len(modules))
    if depth == max_depth or not modules[0].children:
        return
    # Ops of `forward` itself, in a row beside the children: without it the parts would not add up.
    own = [i for m in modules for i in m.own]
    if own:
        yield _row(account, own, OWN, f"{path}.{OWN}" if path else OWN, depth + 1, len(modules))
    for names, parts in _groups(ways, modules):
        joined = joined_names(names)
        below = f"{path}.{joined}" if path else joined
        yield from _rows(account, ways, parts, joined, below, depth + 1, max_depth)


def _without_shells(
    modules: Sequence[_Module], label: str, path: str
) -> tuple[Sequence[_Module], str, str]:
    """A module that is nothing but its one child shares that child's row."""
    while path and all(not m.own and len(m.children) == 1 for m in modules):
        inner = [child for m in modules for child in m.children.values()]
        # Identical modules whose only children have other names keep a row of their own.
        if len({child.name for child in inner}) > 1:
            break
        label, path = f"{label}.{inner[0].name}", f"{path}.{inner[0].name}"
        modules = inner
    return modules, label, path


def _groups(ways: _Ways, modules: Sequence[_Module]) -> Iterator[tuple[list[str], list[_Module]]]:
    """The parts of identical modules: names that share a row, and the modules behind them."""
    parts: dict[str, list[_Module]] = {}
    for module in modules:
        for name, child in module.children.items():
            parts.setdefault(name, []).append(child)
    alike: dict[object, list[str]] = {}
    for name, children in parts.items():
        number = numbered(name)
        family = number[0] if number else name
        # Of all modules that share the row: layer 3 and layer 4 are alike if all their parts are.
        shape = tuple(ways.of(child)[0] for child in children)
        alike.setdefault((family, number is None, shape), []).append(name)
    for names in alike.values():
        by_way: dict[object, list[str]] = {}
        for name in names:
            by_way.setdefault(tuple(ways.of(child)[1] for child in parts[name]), []).append(name)
        # A row per layer would hide the other modules, and nothing is learned from 96 of them.
        found = list(by_way.values()) if len(by_way) <= MAX_WAYS else [names]
        for group in found:
            yield group, [child for name in group for child in parts[name]]


def _row(
    account: Account, ops: Sequence[int], label: str, path: str, depth: int, num_modules: int
) -> Row:
    runs, problem = account.trace.runs, account.problem
    saved = sum(account.saved[i] for i in ops)
    kept = sum(account.base_saved[i] for i in ops)
    again = [i for i in ops if runs[i] > 1]
    extra = sum((runs[i] - 1) * problem.ops[i].cost for i in again)
    return Row(
        label=label,
        path=path or shown(""),
        depth=depth,
        num_modules=num_modules,
        num_ops=len(ops),
        saved=saved,
        keep_all_saved=kept,
        num_recomputed=sum(runs[i] - 1 for i in again),
        extra_cost=extra,
        why=_moved(account, ops, _why(account, ops, saved, kept, extra, len(again))),
    )


def _moved(account: Account, ops: Sequence[int], why: str) -> str:
    """The reason, after what goes to host memory."""
    sent = sum(account.sent[i] for i in ops)
    return f"{format.size(account.problem, sent)} moved to the host; {why}" if sent else why


def _why(
    account: Account, ops: Sequence[int], saved: int, kept: int, extra: int, num_again: int
) -> str:
    def price(cost: int, size: int) -> str:
        return _price(account, cost, size)

    def amount(value: int) -> str:
        return format.size(account.problem, value)

    problem = account.problem
    # What must run once is saved whatever it costs: it is left out of the price of keeping.
    dear = [i for i in ops if account.saved[i] and not problem.ops[i].once]
    fixed = sum(account.saved[i] for i in ops if problem.ops[i].once)
    worth = sum(problem.ops[i].cost for i in dear)
    keeping = price(worth, saved - fixed) if saved > fixed else ""
    if not num_again:
        if not kept and not saved:
            return "saves nothing for the backward"
        if not account.trace.num_recomputed:
            return "kept: nothing has to be recomputed"
        if saved < kept:
            return f"saves {amount(kept - saved)} less for the backward, and nothing is recomputed"
        if not kept:
            return "kept in place of what is made from it"
        if not keeping:
            return "kept: must run exactly once"
        return f"kept: recomputing it would cost {keeping} or more"
    # Recomputed without a saving of its own: its result is needed where another module runs again.
    if kept > saved:
        text = f"recomputed: frees {amount(kept - saved)} at {price(extra, kept - saved)}"
    else:
        text = "recomputed: other recomputed modules read it"
    if keeping:
        text += f"; {amount(saved - fixed)} kept, {keeping} or more"
    return text


def _price(account: Account, cost: int, size: int) -> str:
    """What a GiB costs to free; in other units, the cost of one."""
    problem = account.problem
    if problem.size_unit == "bytes":
        return f"{format.cost(problem, round(cost * GIB / size))} per GiB"
    return f"{cost / size:.3g} {problem.cost_unit} per {problem.size_unit}"


def module_row(account: Account, module: str) -> Row | None:
    """The row of one module with all its parts, by its own path; None if no op stands there."""
    inside = f"{module}."
    ops = [
        op_id
        for op_id, place in enumerate(account.places)
        if place.module == module or place.module.startswith(inside)
    ]
    return _row(account, ops, module, module, 0, 1) if ops else None
