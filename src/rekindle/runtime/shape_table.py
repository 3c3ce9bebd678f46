"""What a managed module runs for a call whose sizes a family of plans covers."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rekindle.capture.changing_sizes import ChangingSizes, Sizes
from rekindle.errors import CaptureError
from rekindle.frontend import Reading

DynamicDims = Mapping[str, Collection[int]]  # argument -> its dimensions whose sizes change


@dataclass(frozen=True, slots=True)
class ShapePlan:
    """The schedule for one set of sizes, with what it needs: of a plan, what a call needs to know.
    The problem of these sizes is not kept."""

    family: Any
    sizes: tuple[int, ...]
    rung: Any  # the schedule, and its code
    peak_bytes: int
    keep_all_peak_bytes: int
    cost_ns: int
    keep_all_cost_ns: int
    budget_bytes: int

    @property
    def joint(self) -> Any:
        return self.family.program.joint

    @property
    def late_runner(self) -> Any:
        return self.rung.late_runner

    @property
    def runner(self) -> Any:
        return self.rung.late_runner.get()

    @property
    def schedule(self) -> Any:
        """The ops in execution order."""
        return self.rung.schedule

    @property
    def overhead(self) -> float:
        """Cost increase over keep-all."""
        return self.cost_ns / self.keep_all_cost_ns - 1 if self.keep_all_cost_ns else 0.0

    def full(self) -> Any:
        """The plan for these sizes, with its problem."""
        return self.family.full_plan(self)


def sizes_reader(changing: ChangingSizes, reading: Reading) -> Callable[[dict[str, Any]], Sizes]:
    """What reads the sizes of a call out of its scope, as Dynamo names what is in it."""
    parts = []
    for i, dim in changing.places:
        source = reading.inputs[i].expression
        if not source.startswith("L["):
            raise CaptureError(f"the size of {source}, which is no argument, changes")
        parts.append(f"{source}.shape[{dim}], ")
    # An expression of Dynamo's own, as it compiles them into guards.
    found: Callable[[dict[str, Any]], Sizes] = eval(f"lambda L: ({''.join(parts)})", {})
    return found


def changing_dims(
    layouts: Mapping[str, Any], entries: Sequence[Any], dynamic: DynamicDims
) -> DynamicDims:
    """The dimensions in which a call differs from a planned one that it is like otherwise, those in
    which families differ, and those that were said to change; none where nothing else is like it,
    or where one of them is 0 or 1, for which torch makes no symbol."""
    found: dict[str, set[int]] = {}
    for entry in entries:
        differ = _differing(layouts, entry.layouts)
        if differ is None:
            continue
        for given in (differ, getattr(entry, "marks", {})):
            for name, dims in given.items():
                found.setdefault(name, set()).update(dims)
        break
    else:
        return {}
    for name, dims in dynamic.items():
        if name in layouts:
            found.setdefault(name, set()).update(d for d in dims if d < len(layouts[name].shape))
    if any(layouts[name].shape[d] < 2 for name, dims in found.items() for d in dims):
        return {}
    return {name: tuple(sorted(dims)) for name, dims in found.items() if dims}


def _differing(layouts: Mapping[str, Any], others: Mapping[str, Any]) -> DynamicDims | None:
    if layouts.keys() != others.keys():
        return None
    found = {}
    for name, mine in layouts.items():
        other = others[name]
        if (mine.dtype, mine.device, mine.requires_grad, len(mine.shape)) != (
            *(other.dtype, other.device, other.requires_grad, len(other.shape)),
        ):
            return None
        dims = [d for d, (a, b) in enumerate(zip(mine.shape, other.shape, strict=True)) if a != b]
        if dims:
            found[name] = tuple(dims)
    return found
