"""The comparison of a living model with eager, step by step and bit by bit.

Allowed is: equal, or refused by name. A difference in silence, an exception that eager does not
raise, a missing one that it does, a fake tensor left behind, a random stream that planning moved
and a call that runs in eager mode without a word are failures.
"""

import dataclasses
import functools
import itertools
import random
import warnings
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from support.compare import difference, keep
from support.living.cases import CASES, CHANGED, STEPS, Case, Living
from support.living.leftovers import fake_tensors_in
from support.schedules import floor, thrice
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.utils import _pytree as pytree

import rekindle
from rekindle.errors import BudgetInfeasible, CaptureError, PlanMismatch
from rekindle.runtime.managed_module import MissedPlanWarning

Facts = dict[str, Tensor | str | None]
PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.Size, torch.device)

REFUSALS = (PlanMismatch, CaptureError, BudgetInfeasible)
IN_PLACE = "modified by an inplace operation"


@dataclass(frozen=True, slots=True)
class How:
    """How a model is managed: a budget, the smallest one, or a schedule that runs ops thrice."""

    level: str  # "1.0" | "0.75" | "smallest" | "thrice"
    on_miss: str = "eager"
    profile: str = "estimate"

    def __str__(self) -> str:
        return f"{self.level}-{self.on_miss}"


@dataclass(slots=True)
class Trace:
    """What one life left to compare."""

    facts: list[Facts] = field(default_factory=list)
    errors: dict[int, Exception] = field(default_factory=dict)
    grad_fns: dict[int, str] = field(default_factory=dict)  # of the first output
    missed: dict[int, str] = field(default_factory=dict)  # first words on a call without a plan
    refused: Exception | None = None  # at planning
    stopped: tuple[int, Exception] | None = None  # by a refusal in a step
    broken: str = ""  # a failure that needs no comparison


@dataclass(frozen=True, slots=True)
class Outcome:
    kind: str
    detail: str = ""

    @property
    def ok(self) -> bool:
        return self.kind in ("equal", "refused", "mismatch", "refused later", "refused in a step")


def judge(case: Case, how: How) -> Outcome:
    """One life in eager mode, one managed, and what became of the second."""
    expected, got = _in_eager_mode(case.name), live(case, how)
    if expected.broken:
        raise AssertionError(f"the case itself is broken: {expected.broken}")
    if got.broken:
        return Outcome(*got.broken.split(": ", 1))
    for step, (then, now) in enumerate(zip(expected.facts, got.facts, strict=False)):
        error = got.errors.get(step)
        if error is not None and case.refusal and case.refusal in str(error):
            return Outcome("refused in a step", f"step {step}: {error}")
        wrong = _wrong_error(expected.errors.get(step), error)
        if wrong:
            return Outcome(wrong[0], f"step {step}: {wrong[1]}")
        found = differences(then, now)
        if found:
            return Outcome("different", f"step {step}: " + "; ".join(found[:4]))
    return _refusal(case, how, got) or _unplanned(case, expected, got) or Outcome("equal")


@functools.lru_cache(maxsize=2)
def _in_eager_mode(name: str) -> Trace:
    return live(CASES[name], None)


def _wrong_error(expected: Exception | None, got: Exception | None) -> tuple[str, str] | None:
    if expected is None and got is None:
        return None
    if expected is None:
        return "crash", f"{type(got).__name__}: {got}"
    if got is None:
        return "missing error", f"eager raises {type(expected).__name__}: {expected}"
    if not isinstance(got, type(expected)):
        said = f"{type(got).__name__}: {got}"
        return "other error", f"{said} where eager raises {type(expected).__name__}: {expected}"
    if IN_PLACE in str(expected) and IN_PLACE not in str(got):
        return "other error", f"{got} where eager raises {expected}"
    return None


def differences(expected: Facts, got: Facts) -> list[str]:
    found = [f"{name}: missing" for name in expected if name not in got]
    found += [f"{name}: not in eager" for name in got if name not in expected]
    for name in expected.keys() & got.keys():
        what = difference(expected[name], got[name])
        if what is not None:
            found.append(f"{name}: {what}")
    return sorted(found)


def _refusal(case: Case, how: How, got: Trace) -> Outcome | None:
    if got.refused is not None:
        kind = "refused" if case.breaks else "refused without need"
        return Outcome(kind, f"{type(got.refused).__name__}: {got.refused}")
    if got.stopped is None:
        return None
    step, error = got.stopped
    if case.refusal and case.refusal in str(error):
        return Outcome("refused in a step", f"step {step}: {error}")
    detail = f"step {step}: {type(error).__name__}: {error}"
    if isinstance(error, PlanMismatch):
        early = step < CHANGED and case.steady and not case.breaks
        fine = how.on_miss == "raise" and not early
        return Outcome("mismatch" if fine else "mismatch without need", detail)
    if isinstance(error, BudgetInfeasible):
        fine = how.on_miss == "replan" and step >= CHANGED and how.level != "1.0"
        return Outcome("refused later" if fine else "crash", detail)
    fine = how.on_miss == "replan" and case.breaks
    return Outcome("refused later" if fine else "refused without need", detail)


def _unplanned(case: Case, expected: Trace, got: Trace) -> Outcome | None:
    """A call in eager mode is said, and one that reads what was planned is covered."""
    if got.refused is not None or not case.shows:
        return None
    said = False
    for step in sorted(got.grad_fns):
        said = said or step in got.missed
        planned = got.grad_fns[step] != expected.grad_fns[step]
        if planned:
            continue
        if step < CHANGED and case.steady and not case.breaks:
            return Outcome("missed without need", f"step {step}: {got.missed.get(step)}")
        if not said:
            return Outcome("unplanned in silence", f"step {step}: {got.grad_fns[step]}")
    return None


def live(case: Case, how: How | None) -> Trace:
    """Four steps of a model, with its changes between them."""
    _seed()
    model = case.make().train()
    trace = Trace()
    try:
        if how is not None:
            model = _planned(model, how, trace)
        for step in range(STEPS):
            if trace.broken or trace.stopped:
                break
            try:
                model = model.before(step) or model
            except REFUSALS as error:  # of a call that belongs to the change
                trace.stopped = (step, error)
                break
            _step(model, step, trace)
    finally:
        model.leave()
    if how is not None and not trace.broken:
        left = fake_tensors_in(model)
        if left:
            trace.broken = f"fake tensor left: {', '.join(left[:4])}"
    return trace


def _seed() -> None:
    torch.manual_seed(7)
    random.seed(7)
    numpy.random.seed(7)  # noqa: NPY002 - the stream that models use


def _planned(model: Living, how: How, trace: Trace) -> Living:
    """The managed model; planning leaves everything as it was."""
    args, kwargs = model.inputs(0)
    before = _state(model) | describe("sample", (args, kwargs))
    managed = model
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            managed = manage(model, args, kwargs, how)
    except CaptureError as error:
        trace.refused = error
    except Exception as error:
        trace.broken = f"crash: while planning: {type(error).__name__}: {error}"
        return model
    changed = differences(before, _state(managed) | describe("sample", (args, kwargs)))
    left = fake_tensors_in(managed)
    if changed:
        trace.broken = f"planning moved: {'; '.join(changed[:4])}"
    elif left:
        trace.broken = f"fake tensor left: after planning: {', '.join(left[:4])}"
    return managed


def manage(model: nn.Module, args: Any, kwargs: Any, how: How) -> Any:
    options: dict[str, Any] = {
        "on_miss": how.on_miss,
        "profile": how.profile,
        "time_limit_s": 5.0,
        "cache": False,
    }
    if how.level == "thrice":
        return rekindle.rematerialize(model, args, kwargs, schedule=thrice, **options)
    budget: float | str = "1B" if how.level == "smallest" else float(how.level)
    # The smallest peak found need not be a budget that is met (E16): then somewhat more, and at
    # last the schedule that is greedy for memory.
    for growth in (1.0, 1.1, 1.3):
        try:
            return rekindle.rematerialize(model, args, kwargs, budget=budget, **options)
        except BudgetInfeasible as error:
            smallest = error.smallest_peak_bytes
            if smallest is None:
                raise
            budget = f"{int(smallest * growth)}B"
    return rekindle.rematerialize(model, args, kwargs, schedule=floor, **options)


def _step(model: Living, step: int, trace: Trace) -> None:
    args, kwargs = model.inputs(step)
    facts: Facts = {}
    untouched = _state(model)

    def note(name: str, value: Any) -> None:
        facts.update(describe(name, value))
        first = next((t for t in pytree.tree_leaves(value) if isinstance(t, Tensor)), None)
        if name == "output" and first is not None and first.grad_fn is not None:
            trace.grad_fns[step] = type(first.grad_fn).__name__

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            model.train_step(note, args, kwargs)
        except REFUSALS as error:
            trace.stopped = (step, error)
            # A step with several calls has drawn and written in those before.
            several = type(model).train_step is not Living.train_step
            moved = [] if several else differences(untouched, _state(model))
            if moved:
                trace.broken = f"a refusal moved: {'; '.join(moved[:4])}"
            return
        except Exception as error:
            trace.errors[step] = error
    missed = [str(w.message) for w in said if issubclass(w.category, MissedPlanWarning)]
    if missed:
        trace.missed[step] = missed[0]
    own = [str(w.message) for w in said if str(w.message).startswith("the model says")]
    facts |= describe("warnings", own)
    if step not in trace.errors:
        facts |= _gradients(model, (args, kwargs))
        _descend(model)
    model.zero_grad(set_to_none=True)
    trace.facts.append(facts | _state(model))


def _gradients(model: nn.Module, inputs: Any) -> Facts:
    facts: Facts = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        facts |= describe(f"gradient {name}", parameter.grad)
    for path, leaf in enumerate(pytree.tree_leaves(inputs)):
        if isinstance(leaf, Tensor) and leaf.is_leaf:
            facts |= describe(f"gradient of input {path}", leaf.grad)
    return facts


def _descend(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.add_(parameter.grad.to(parameter.dtype), alpha=-0.1)


def _state(model: Living) -> Facts:
    """What a caller could find between two calls."""
    facts: Facts = {
        "stream of torch": torch.get_rng_state(),
        "stream of random": str(hash(random.getstate())),
        "stream of numpy": str(hash(str(numpy.random.get_state()))),  # noqa: NPY002
        "default dtype": str(torch.get_default_dtype()),
        "grad mode": str(torch.is_grad_enabled()),
    }
    for name, parameter in model.named_parameters(remove_duplicate=False):
        facts[f"parameter {name}"] = keep(parameter)
    for name, buffer in model.named_buffers(remove_duplicate=False):
        facts[f"buffer {name}"] = keep(buffer)
    return facts | describe("observed", model.observed())


def describe(name: str, value: Any) -> Facts:
    """Tensors by their bits, generators by their state, everything else by what it holds."""
    if isinstance(value, FakeTensor):
        return {name: "a fake tensor"}
    if isinstance(value, Tensor):
        tensor = value.to_dense() if value.is_sparse else value
        kind = f"{type(value).__name__} {value.layout} requires_grad={value.requires_grad}"
        return {f"{name} kind": kind, name: keep(tensor)}
    if isinstance(value, torch.Generator):
        return {name: value.get_state()}
    if isinstance(value, random.Random):
        return {name: str(hash(value.getstate()))}
    if isinstance(value, numpy.random.Generator):
        return {name: str(value.bit_generator.state)}
    if isinstance(value, (itertools.count, *PLAIN)):
        return {name: repr(value)}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [f.name for f in dataclasses.fields(value)]
        value = {n: getattr(value, n) for n in names}
    elif isinstance(value, dict):
        value = {str(k): v for k, v in value.items()}
    elif isinstance(value, (list, tuple)) or type(value).__name__ == "deque":
        value = {str(i): v for i, v in enumerate(value)} | {"kind": type(value).__name__}
    else:
        return {name: type(value).__name__}
    facts: Facts = {f"{name} keys": repr(list(value))}
    for key, item in value.items():
        facts |= describe(f"{name}.{key}", item)
    return facts
