"""The plans of one managed module: which of them covers a call, and running it.

Each plan stands with the guards of the call that it was made for. The guards are Dynamo's: they
hold everything that the call read of Python. Numbers that Python read from tensors are asked again
at each call, once the guards hold.
"""

import copy
import functools
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from rekindle.capture import JointGraph
from rekindle.capture.changing_sizes import Sizes
from rekindle.capture.pytrees import named_tensors
from rekindle.errors import CaptureError, PlanMismatch, RekindleError
from rekindle.frontend import Call, Reading, in_words
from rekindle.plans.options import OnMiss
from rekindle.runtime.lazy_runner import LateRunner
from rekindle.runtime.runner import Runner
from rekindle.runtime.shape_table import DynamicDims, changing_dims, sizes_reader
from rekindle.runtime.step_watch import Excess

_MOST_FAMILIES = 4  # of one managed module
_MOST_REFUSED = 2  # tries for the same dimensions; one may have met a size that is an exception
_MOST_READ_AGAIN = 8  # of one managed module: a counter that forward reads is new at each call
log = logging.getLogger("rekindle")

# (model, call, which sizes change, entries so far, the first) -> family, reading and sizes, or None
MakeFamily = Callable[..., Any]


class Plan(Protocol):
    """What a table needs of a plan, or of a family of plans."""

    def full(self) -> Any: ...

    peak_bytes: int
    keep_all_peak_bytes: int

    @property
    def joint(self) -> JointGraph:
        """The graph of the call."""

    @property
    def reading(self) -> Reading | None:
        """The call as it was read, with its guards."""

    @property
    def late_runner(self) -> LateRunner:
        """What runs the plan, made when it is needed."""

    @property
    def runner(self) -> Runner:
        """What runs the plan."""

    @property
    def overhead(self) -> float:
        """The share of time that recomputation adds."""


class InRegions(Protocol):
    """A model whose parts are planned, each with guards of its own (`runtime.regions`)."""

    plan: Any

    def run(self, model: nn.Module, call: Call) -> Any: ...


class AnswerChanged(Exception):
    """The guards hold, and a number that Python reads from a tensor is another one."""


@dataclass(frozen=True, slots=True)
class Layout:
    """What is said of a tensor argument in a message."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    def __str__(self) -> str:
        return "x".join(map(str, self.shape)) or "scalar"


def input_tensors(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The tensor arguments of a call, by name."""
    tensors = named_tensors((tuple(args), dict(kwargs)), "")
    return {_argument(name): tensor for name, tensor in tensors.items()}


def input_layouts(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Layout]:
    """What is said of the tensor arguments of a call, by name."""
    return {
        name: Layout(t.shape, t.dtype, t.device, t.requires_grad)
        for name, t in input_tensors(args, kwargs).items()
    }


def _argument(path: str) -> str:
    """`[0][1]` is input 1, `[1]['ids']` is input ids."""
    _, first, *rest = path.replace("]", "").split("[")
    if first == "1" and rest:
        rest[0] = rest[0].strip("'")
    return f"input {'.'.join(rest)}"


class Entry:
    """A plan with the call that it covers."""

    __slots__ = (
        *("before", "call", "guards", "has_run", "layouts", "may_turn_back", "number", "order"),
        *("plan", "reading", "scope", "unsettles"),
    )

    def __init__(
        self,
        plan: Any,
        reading: Reading,
        layouts: dict[str, Layout],
        number: int,
        order: tuple[int | None, ...] | None = None,
    ) -> None:
        self.plan = plan
        # Which input of this reading each input of the plan's is, where another call was read.
        self.order = order
        # What is to be done first at the next call, with what enters its graph.
        self.before: Callable[[Sequence[torch.Tensor]], None] | None = None
        self.scope: dict[str, Any] | None = None  # of the next call, where its backward asks again
        self.number = number  # in the order in which the plans were made
        self.has_run = False
        self.unsettles = False  # forward itself changes what its guards are about
        self.reading = reading
        # Which input of this reading each input of the plan's is, where another call was read.
        self.order = order
        self.layouts = layouts
        self.guards = reading.guards
        self.call = reading.replay(self._run)
        draws = any(i.expression.startswith("random_value") for i in reading.inputs)
        self.may_turn_back = draws and bool(plan.joint.scalars or reading.asked)

    def covers(self, scope: dict[str, Any]) -> bool:
        """Whether the call is the one that the plan is for."""
        return self.guards.check(scope)

    def prepare(self) -> None:
        """Before a call that it covers."""

    def _plan_for(self, inputs: Sequence[Any]) -> tuple[Any, Sizes]:
        return self.plan, ()

    def _run(self, *inputs: Any) -> list[Any]:
        """What runs the graph of the call; the replay around it does the rest."""
        for i, name, value in self.reading.asked:
            if getattr(inputs[i], name) != value:
                raise AnswerChanged(f"{name} of a tensor that forward reads is no longer {value}")
        if self.reading.apart and len(set(map(id, inputs))) < len(inputs):
            raise AnswerChanged("two of the tensors that forward reads are one now")
        if self.order is not None:
            inputs = tuple([inputs[i or 0] for i in self.order])
        for i in self.plan.joint.made_to_require:
            inputs[i].requires_grad_()
        before, self.before = self.before, None
        if before is not None:
            before(inputs)
        plan, sizes = self._plan_for(inputs)
        runner: Runner = plan.runner
        residents = runner.gather(inputs)
        why = runner.broken_assumption(residents, sizes)
        if why is not None:
            raise AnswerChanged(why)
        scope, self.scope = self.scope, None
        holds = None if scope is None else functools.partial(self._refuse_changes, scope)
        return runner.all_outputs(runner(residents, holds, sizes), residents, sizes)

    def _refuse_changes(self, scope: dict[str, Any]) -> None:
        """Raises where Python code of the backward would read something else than was planned."""
        failed = self.guards.failed_later(scope)
        if failed is not None:
            raise PlanMismatch(
                "a hook or a torch.autograd.Function reads in the backward what has changed since "
                f"the forward: {in_words(failed)}; change it after the backward, or call the "
                "original model for this step"
            )

    def copied(self) -> "Entry":
        """The same plan for a copied module, with a state of its own."""
        return Entry(self.plan, self.reading, self.layouts, self.number, self.order)


class FamilyEntry(Entry):
    """A family of plans with the calls that it covers: those that differ in sizes alone."""

    __slots__ = ("family", "marks", "sizes", "sizes_of")

    def __init__(
        self,
        family: Any,
        reading: Reading,
        layouts: dict[str, Layout],
        number: int,
        sizes: Sizes,
        marks: DynamicDims,
    ) -> None:
        self.family = family
        self.marks = marks  # argument -> its dimensions whose sizes change
        self.sizes = sizes  # of the last call
        self.sizes_of = sizes_reader(family.changing, reading)
        super().__init__(family, reading, layouts, number)  # a plan of it comes with each call

    def covers(self, scope: dict[str, Any]) -> bool:
        if not self.guards.check(scope):
            return False
        sizes = self.sizes_of(scope)
        if not self.family.covers(sizes):
            return False
        self.sizes = sizes
        return True

    def prepare(self) -> None:
        """Raises BudgetInfeasible where no schedule for these sizes is within the budget."""
        self.plan = self.family.plan_at(self.sizes)

    def _plan_for(self, inputs: Sequence[Any]) -> tuple[Any, Sizes]:
        # Not `plan`: another thread may have called with other sizes since.
        sizes = self.family.changing.of_inputs(inputs)
        return self.family.plan_at(sizes), sizes

    def copied(self) -> "FamilyEntry":
        return FamilyEntry(
            *(self.family, self.reading, self.layouts, self.number, self.sizes, self.marks)
        )


def _number(entry: Entry) -> int:
    return entry.number


class Manager:
    """The plans of one managed module, the one used last in front."""

    def __init__(
        self,
        on_miss: OnMiss,
        make_plan: Callable[..., Any],
        plan_joint: Callable[..., Any],
        record: Callable[..., tuple[JointGraph, Reading]],
        loss_fn: Callable[..., Any] | None,
        correct_plan: Callable[[Any, Excess | int, int], Any],
        max_plans: int,
        make_family: MakeFamily | None = None,
        dynamic: Mapping[str, Any] | None = None,
    ) -> None:
        self.on_miss = on_miss
        self.make_family = make_family  # None: sizes are as planned, or another plan's
        self.dynamic = dynamic or {}  # argument -> dimensions that were said to change
        self.refused: Counter[Any] = Counter()  # dimensions, and how often there was no family
        self.num_families = 0
        self.make_plan = make_plan
        self.plan_joint = plan_joint
        self.record = record  # what a call runs, before any rewrite
        self.loss_fn = loss_fn
        self.correct_plan = correct_plan  # where a step needed more, or had less, than planned
        self.max_plans = max_plans
        # For a model that cannot be read in one piece: made where planning it was refused.
        self.in_regions: Callable[[nn.Module, CaptureError], InRegions] | None = None
        self.regions: InRegions | None = None
        self.entries: list[Entry] = []
        self.first: Entry | None = None
        self.num_made = 0
        self.num_read_again = 0
        self.num_filled = 0  # plans made since Python code had filled a table or a cache
        self.said: set[str] = set()

    def __deepcopy__(self, memo: dict[int, Any]) -> "Manager":
        """Plans are shared; guards say whether a copied module is as planned."""
        new = Manager(
            *(self.on_miss, self.make_plan, self.plan_joint, self.record),
            *(self.loss_fn, self.correct_plan, self.max_plans),
            *(self.make_family, self.dynamic),
        )
        new.refused, new.num_families = Counter(self.refused), self.num_families
        copies = {id(e): e.copied() for e in self.entries}
        new.entries = [copies[id(e)] for e in self.entries]
        new.num_made = self.num_made
        new.first = None if self.first is None else copies[id(self.first)]
        new.in_regions = self.in_regions
        new.regions = copy.deepcopy(self.regions, memo)
        return new

    @property
    def plans(self) -> tuple[Any, ...]:
        """The distinct plans, in the order in which they were made."""
        plans = {e.number: e.plan for e in sorted(self.entries, key=_number)}
        return tuple([p.full() for p in plans.values()])

    @property
    def plans_gradients(self) -> bool:
        """Whether training is what is planned; a first plan made under no_grad is for inference."""
        return self.first is None or not self.first.plan.joint.forward_only

    def add(self, plan: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Entry:
        """Puts a plan in front; the least recently used one may go for it."""
        assert plan.reading is not None
        self._make_room()
        entry = Entry(plan, plan.reading, input_layouts(args, kwargs), self.num_made)
        self.num_made += 1
        self.entries.insert(0, entry)
        if self.first is None:
            self.first = entry
        return entry

    def put(self, entry: Entry, plan: Any) -> None:
        """Another plan in the place of the one of this entry and of those that share it."""
        for each in (entry, *self.entries):
            if each.number == entry.number:
                each.plan = plan

    def read_again(self, model: nn.Module, call: Call) -> Entry | None:
        """An entry for a call whose tensors are laid out as planned, where other Python leads to
        the ops of a plan: a list that is not empty now, a counter, a copied module."""
        if self.num_read_again >= _MOST_READ_AGAIN:
            return None
        layouts = input_layouts(call.args, call.keywords)
        plain = [entry for entry in self.entries if not isinstance(entry, FamilyEntry)]
        laid_out = [entry for entry in plain if entry.layouts == layouts]
        if not laid_out:
            return None
        entries = {entry.number: entry for entry in laid_out}.values()
        self.num_read_again += 1
        try:
            joint, reading = self.record(model, call.args, call.keywords)
        except RekindleError:
            return None
        reading.held.clear()
        for entry in entries:
            planned = entry.plan.joint.recorded
            if len(joint.outputs) != len(planned.outputs):
                continue  # gradients cannot arrive for outputs that it has not
            alike = joint.with_tangents(planned.tangents, planned.autocast, planned.retained)
            if alike.is_like(planned):
                order = joint.inputs_of(planned)
                found = Entry(entry.plan, reading, layouts, entry.number, order)
                self.entries.insert(0, found)
                return found
        return None

    def family_for(self, model: nn.Module, call: Call) -> FamilyEntry | None:
        """A family for a call that differs from a planned one in sizes alone; None where there is
        none, which is said once."""
        if self.make_family is None or self.num_families >= _MOST_FAMILIES:
            return None
        layouts = input_layouts(call.args, call.keywords)
        marks = changing_dims(layouts, self.entries, self.dynamic)
        key = tuple(sorted((name, tuple(sorted(dims))) for name, dims in marks.items()))
        if not marks or self.refused[key] >= _MOST_REFUSED:
            return None
        made = self.make_family(model, call, marks, self.entries, self.first, self.dynamic)
        if made is None:
            self.refused[key] += 1
            return None
        self.num_families += 1
        family, reading, sizes = made
        self._make_room()
        entry = FamilyEntry(family, reading, layouts, self.num_made, sizes, marks)
        self.num_made += 1
        self.entries.insert(0, entry)
        return entry

    def use(self, entry: Entry) -> None:
        """Moves an entry to the front: the next call most likely is like this one."""
        if self.entries[0] is not entry:
            self.entries.remove(entry)
            self.entries.insert(0, entry)

    def difference(self, call: Call) -> str:
        """How a call differs from the planned one that is most like it."""
        layouts = input_layouts(call.args, call.keywords)
        nearest = min(
            self.entries, key=lambda e: len(set(layouts.items()) ^ set(e.layouts.items()))
        )
        if layouts.keys() != nearest.layouts.keys():
            names = ", ".join(layouts) or "none"
            planned = ", ".join(nearest.layouts) or "none"
            return f"its tensor arguments are {names}, planned {planned}"
        for name, layout in layouts.items():
            planned_layout = nearest.layouts[name]
            if layout.shape != planned_layout.shape:
                return f"{name} is {layout}, planned {planned_layout}"
            for aspect in ("dtype", "device", "requires_grad"):
                now, then = getattr(layout, aspect), getattr(planned_layout, aspect)
                if now != then:
                    return f"{aspect} of {name} is {now}, planned {then}"
        return in_words(nearest.guards.failed(call.scope))

    def has_filled(self, call: Call) -> bool:
        """Whether this call would be planned but for what forward has changed when it ran: a table
        or a cache that its first call fills. One such call is planned anew."""
        layouts = input_layouts(call.args, call.keywords)
        return self.num_filled == 0 and any(
            entry.unsettles and entry.layouts == layouts for entry in self.entries
        )

    def _make_room(self) -> None:
        first = -1 if self.first is None else self.first.number
        numbers = {entry.number: None for entry in self.entries if entry.number != first}
        if len(numbers) + 1 < self.max_plans or not numbers:
            return
        oldest = list(numbers)[-1]
        self.entries = [entry for entry in self.entries if entry.number != oldest]
        what = (
            f"more than {self.max_plans} call signatures: the least recently used plan is dropped "
            "and planned again when it is needed; pad inputs to fewer shapes, or raise max_plans"
        )
        if what not in self.said:
            self.said.add(what)
            log.warning(what)
