"""The managed module: the same class, parameters, buffers, state_dict keys and `forward` signature,
whose forward and backward run a plan.

A call that no plan covers runs the original forward and says so once, is planned anew, or raises,
as `on_miss` says.
"""

import copy
import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

import torch
from torch import nn

from rekindle.capture import JointGraph, capture
from rekindle.capture.structure import Structure, split
from rekindle.errors import BudgetInfeasible, PlanMismatch
from rekindle.lower.run import Runner
from rekindle.lower.signature import ModuleView, Settings, call_signature

OnMiss = Literal["eager", "replan", "raise"]
KEY = "_rekindle"


class MissedPlanWarning(UserWarning):
    """A managed module ran a call without a plan."""


class Plan(Protocol):
    """What the module needs of a plan."""

    joint: JointGraph
    runner: Runner


class Manager:
    """The plans of one managed module, by signature."""

    def __init__(
        self,
        on_miss: OnMiss,
        make_plan: Callable[[nn.Module, Sequence[Any], Mapping[str, Any]], Any],
        plan_joint: Callable[..., Any],
        loss_fn: Callable[..., Any] | None,
    ) -> None:
        self.on_miss = on_miss
        self.make_plan = make_plan
        self.plan_joint = plan_joint
        self.loss_fn = loss_fn
        self.plans: dict[tuple[Any, ...], list[Entry]] = {}
        self.first: Entry | None = None
        self.said: set[str] = set()

    def __deepcopy__(self, memo: dict[int, Any]) -> "Manager":
        """Plans are shared; what they know of one module's objects is looked up anew."""
        new = Manager(self.on_miss, self.make_plan, self.plan_joint, self.loss_fn)
        assert self.first is not None
        fresh = {id(e): e.copied() for entries in self.plans.values() for e in entries}
        new.first = fresh[id(self.first)]
        new.plans = {k: [fresh[id(e)] for e in entries] for k, entries in self.plans.items()}
        return new

    def add(self, model: nn.Module, plan: Any, args: Sequence[Any], kwargs: Any) -> "Entry":
        tensors, structure = split((tuple(args), dict(kwargs)))
        entry = Entry(plan)
        entry.look_at(model)
        self.plans.setdefault(call_signature(tensors, structure), []).append(entry)
        if self.first is None:
            self.first = entry
        return entry


class Entry:
    """A plan and one module's view of it. A copy of the module is held to what was planned, not to
    how the copy happens to be when it is first called."""

    __slots__ = ("pattern", "plan", "view")

    def __init__(self, plan: Any, pattern: ModuleView | None = None) -> None:
        self.plan = plan
        self.pattern = pattern
        self.view: ModuleView | None = None

    def look_at(self, model: nn.Module) -> ModuleView:
        if self.view is None:
            joint = self.plan.joint
            self.view = ModuleView(model, joint.parameters, joint.buffers, self.pattern)
        return self.view

    def copied(self) -> "Entry":
        return Entry(self.plan, self.view or self.pattern)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Entry":
        return self.copied()


class Managed:
    """Mixed in before the model's own class."""

    @property
    def plan(self) -> Any:
        return self.__dict__[KEY].first.plan

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        new = object.__new__(type(self))
        memo[id(self)] = new
        new.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return new

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles as the model it manages: plans are files of their own, never pickles."""
        plain = object.__new__(type(self).__rekindle_class__)  # type: ignore[attr-defined]
        plain.__dict__.update({k: v for k, v in self.__dict__.items() if k != KEY})
        return plain.__reduce_ex__(protocol)


@functools.cache
def managed_class(cls: type[nn.Module]) -> type[nn.Module]:
    @functools.wraps(cls.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return run_call(self, args, kwargs)

    body = {
        "forward": forward,
        "__rekindle_class__": cls,
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
    }
    return type(cls.__name__, (Managed, cls), body)


def manage(model: nn.Module, manager: Manager, inplace: bool) -> nn.Module:
    """The managed module: the given object itself, or a new one that shares what it holds."""
    cls = managed_class(type(model))  # type: ignore[arg-type]
    if inplace:
        model.__dict__[KEY] = manager
        model.__class__ = cls
        return model
    new = object.__new__(cls)
    new.__dict__.update(model.__dict__)
    for name, value in model.__dict__.items():
        if "hooks" in name and isinstance(value, dict):
            new.__dict__[name] = copy.copy(value)
    new.__dict__[KEY] = manager
    for entries in manager.plans.values():
        for entry in entries:
            entry.pattern, entry.view = entry.view, None
            entry.look_at(new)
    return new


def plain_forward(model: nn.Module) -> Callable[..., Any]:
    """The forward of the model's own class, managed or not."""
    cls = getattr(type(model), "__rekindle_class__", type(model))
    return functools.partial(cls.forward, model)


def run_call(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    manager: Manager = model.__dict__[KEY]
    tensors, structure = split((args, kwargs))
    entries = manager.plans.get(call_signature(tensors, structure))
    reason = "these arguments were not planned (shapes, dtypes, values, grad mode or autocast)"
    for entry in entries or ():
        view = entry.view or entry.look_at(model)
        state = view.tensors()
        why = view.miss(state)
        if why is None:
            why = view.changed(functools.partial(_is_unread, manager, model, entry, args, kwargs))
        if why is None:
            why = entry.plan.runner.broken_assumption(state, tensors)
        if why is None:
            if entry.plan.runner.wanted is not None:
                _adopt(manager, model, entry)
            return _run(model, entry.plan, state, tensors)
        reason = why
    return _missed(model, manager, args, kwargs, reason)


def captured_call(loss_fn: Callable[..., Any] | None) -> Callable[..., Any]:
    """What a plan covers: the model's own forward, and the loss where one was given."""

    def call(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        out = plain_forward(model)(*args, **kwargs)
        return out if loss_fn is None else loss_fn(out)

    return call


def _is_unread(
    manager: Manager,
    model: nn.Module,
    entry: Entry,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    settings: Settings,
    name: str,
) -> bool:
    """Whether forward does without this attribute: captured without it, it is the same."""
    owner = settings.owner
    if name not in vars(owner) or hasattr(type(owner), name):
        return False
    value = vars(owner).pop(name)
    try:
        joint = capture(model, args, kwargs, call=captured_call(manager.loss_fn))
        planned = entry.plan.joint
        if (joint.tangents, joint.autocast) != (planned.tangents, planned.autocast):
            joint = joint.with_tangents(planned.tangents, planned.autocast)
        return joint.is_like(planned)
    except Exception:  # it does read it
        return False
    finally:
        setattr(owner, name, value)


def _adopt(manager: Manager, model: nn.Module, entry: Entry) -> None:
    """The last backward got other gradients than planned: plan for those from now on."""
    runner = entry.plan.runner
    wanted, runner.wanted = runner.wanted, None
    try:
        plan = manager.plan_joint(wanted.joint, entry.plan, same_ops=wanted.twin is not None)
    except BudgetInfeasible as error:
        _say(manager, f"gradients arrive for other outputs than planned, and for those {error}")
        return
    entry.plan = plan


def _run(
    model: nn.Module, plan: Plan, state: list[torch.Tensor], tensors: list[torch.Tensor]
) -> Any:
    runner = plan.runner
    residents = runner.gather(state, tensors)
    outs = runner(residents)
    structure: Structure = plan.joint.output_structure
    out, attributes = structure.rebuild(runner.all_outputs(outs, residents))
    for (path, name), tensor in zip(plan.joint.attributes, attributes, strict=True):
        setattr(model.get_submodule(path), name, tensor)  # as forward does
    return out


def _missed(model: nn.Module, manager: Manager, args: Any, kwargs: Any, reason: str) -> Any:
    if manager.on_miss == "raise":
        raise PlanMismatch(f"no plan covers this call: {reason}; plan it, or use on_miss='replan'")
    if manager.on_miss == "replan":
        plan = manager.make_plan(model, args, kwargs)
        entry = manager.add(model, plan, args, kwargs)
        tensors, _ = split((args, kwargs))
        return _run(model, plan, entry.look_at(model).tensors(), tensors)
    _say(manager, f"this call runs eagerly, without a plan, perhaps above the budget: {reason}")
    out = plain_forward(model)(*args, **kwargs)
    return out if manager.loss_fn is None else manager.loss_fn(out)


def _say(manager: Manager, what: str) -> None:
    if what not in manager.said:
        manager.said.add(what)
        warnings.warn(f"rekindle: {what}", MissedPlanWarning, stacklevel=5)
