"""The managed module: the same class, parameters, buffers, state_dict keys and `forward` signature,
whose forward and backward run a plan.

A call that no plan covers runs the original forward and warns once, is planned, or raises, as
`on_miss` says. A module that was managed without a sample plans the first call with gradients. New
plans are logged by the logger "rekindle". Beyond `max_plans` plans, the least recently used one is
dropped.
"""

import copy
import functools
import inspect
import logging
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from rekindle.capture import JointGraph
from rekindle.capture.pytrees import Structure, split
from rekindle.errors import BudgetInfeasible, PlanMismatch
from rekindle.plans.options import OnMiss
from rekindle.runtime.call_signature import ModuleView, Settings, call_signature
from rekindle.runtime.measured_step import resident_tensors
from rekindle.runtime.plan_corrections import follow_watch, shown_size
from rekindle.runtime.runner import Runner
from rekindle.runtime.step_watch import Excess

KEY = "_rekindle"
FORWARD = "_rekindle_forward"  # a forward that the object had of its own, beside its class's
LOSS_ARGS = "loss_args"  # keyword of a managed call: what `loss_fn` gets besides the output
log = logging.getLogger("rekindle")


class MissedPlanWarning(UserWarning):
    """A managed module ran a call without a plan."""


class Plan(Protocol):
    """What the module needs of a plan."""

    joint: JointGraph
    peak_bytes: int
    keep_all_peak_bytes: int

    @property
    def runner(self) -> Runner: ...

    @property
    def overhead(self) -> float: ...


class Manager:
    """The plans of one managed module, by signature."""

    def __init__(
        self,
        on_miss: OnMiss,
        make_plan: Callable[[nn.Module, Sequence[Any], Mapping[str, Any], Any], Any],
        plan_joint: Callable[..., Any],
        record: Callable[[nn.Module, Sequence[Any], Mapping[str, Any]], JointGraph],
        loss_fn: Callable[..., Any] | None,
        correct_plan: Callable[[Any, Excess | int, int], Any],
        max_plans: int,
    ) -> None:
        self.on_miss = on_miss
        self.make_plan = make_plan
        self.plan_joint = plan_joint
        self.record = record  # what the model runs, before any rewrite
        self.loss_fn = loss_fn
        self.correct_plan = correct_plan  # where a step needed more, or had less, than planned
        self.max_plans = max_plans
        self.plans: dict[tuple[Any, ...], list[Entry]] = {}
        self.first: Entry | None = None
        self.clock = 0  # calls so far
        self.said: set[str] = set()

    def __deepcopy__(self, memo: dict[int, Any]) -> "Manager":
        """Plans are shared; what they know of one module's objects is looked up anew."""
        new = Manager(
            *(self.on_miss, self.make_plan, self.plan_joint, self.record, self.loss_fn),
            correct_plan=self.correct_plan,
            max_plans=self.max_plans,
        )
        fresh = {id(e): e.copied() for e in self.entries}
        new.first = None if self.first is None else fresh[id(self.first)]
        new.plans = {k: [fresh[id(e)] for e in entries] for k, entries in self.plans.items()}
        return new

    @property
    def entries(self) -> list["Entry"]:
        return [entry for entries in self.plans.values() for entry in entries]

    @property
    def plans_gradients(self) -> bool:
        """Whether training is what is planned; a first plan made under no_grad is for inference."""
        return self.first is None or not self.first.plan.joint.forward_only

    def add(self, model: nn.Module, plan: Any, args: Sequence[Any], kwargs: Any) -> "Entry":
        tensors, structure = split((tuple(args), dict(kwargs)))
        self._make_room()
        entry = Entry(plan)
        entry.used = self.clock
        entry.look_at(model)
        self.plans.setdefault(call_signature(tensors, structure), []).append(entry)
        if self.first is None:
            self.first = entry
        return entry

    def _make_room(self) -> None:
        others = [entry for entry in self.entries if entry is not self.first]
        if len(others) + 1 < self.max_plans or not others:
            return
        oldest = min(others, key=lambda entry: entry.used)
        for signature, entries in list(self.plans.items()):
            if oldest in entries:
                entries.remove(oldest)
            if not entries:
                del self.plans[signature]
        what = (
            f"more than {self.max_plans} call signatures: the least recently used plan is dropped "
            "and made again when it is needed; pad inputs to fewer shapes, or raise max_plans"
        )
        if what not in self.said:
            self.said.add(what)
            log.warning(what)


class Entry:
    """A plan and one module's view of it. A copy of the module is held to what was planned, not to
    how the copy happens to be when it is first called."""

    __slots__ = ("pattern", "plan", "used", "view")

    def __init__(self, plan: Any, pattern: ModuleView | None = None) -> None:
        self.plan = plan
        self.pattern = pattern
        self.used = 0  # the manager's clock at its last call
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


class _Told:
    """An attribute of managed modules that gives way to one of that name which the model has."""

    def __init__(self, read: Callable[[Manager], Any]) -> None:
        self.read = read
        self.name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, model: Any, owner: type) -> Any:
        if model is None:
            return self
        for table in ("_parameters", "_buffers", "_modules"):
            if self.name in model.__dict__[table]:
                return model.__dict__[table][self.name]
        cls = owner.__rekindle_class__  # type: ignore[attr-defined]
        if hasattr(cls, self.name):
            return getattr(super(Managed, model), self.name)
        return self.read(model.__dict__[KEY])


class Managed:
    """Mixed in before the model's own class."""

    # The first plan (None where the first call is still to come), and one per kind of call.
    plan = _Told(lambda manager: None if manager.first is None else manager.first.plan)
    plans = _Told(lambda manager: tuple(entry.plan for entry in manager.entries))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        new = object.__new__(type(self))
        memo[id(self)] = new
        new.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return new

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles as the model it manages: plans are files of their own, never pickles."""
        plain = object.__new__(plain_class(self))
        plain.__dict__.update({k: v for k, v in self.__dict__.items() if k not in (KEY, FORWARD)})
        if FORWARD in self.__dict__:
            # Bound to this object still, as which pickle knows the model that it writes.
            plain.__dict__["forward"] = self.__dict__[FORWARD]
        make, args, *rest = plain.__reduce_ex__(protocol)
        # pickle demands of `copyreg.__newobj__`, by its name, that it makes this very class.
        return (functools.partial(make, *args), (), *rest)


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


def plain_class(model: Any) -> type[nn.Module]:
    """The class of the model, or the one that it had before it was managed."""
    cls = type(model)
    return getattr(cls, "__rekindle_class__", cls)


def is_managed(model: nn.Module) -> bool:
    return KEY in model.__dict__


def plan_of(model: nn.Module) -> Any:
    """The first plan of a managed module, or None, whatever attributes the model has."""
    first = model.__dict__[KEY].first
    return None if first is None else first.plan


def loss_of(model: nn.Module) -> Callable[..., Any] | None:
    """The `loss_fn` that a call of this model computes as well, if there is one."""
    manager: Manager | None = model.__dict__.get(KEY)
    return None if manager is None else manager.loss_fn


def manage(model: nn.Module, manager: Manager, inplace: bool) -> nn.Module:
    """The managed module: the given object itself, or a new one that shares what it holds. One
    that is managed already gets the new manager in place of the old."""
    cls = managed_class(plain_class(model))  # type: ignore[arg-type]
    held = FORWARD if is_managed(model) else "forward"
    own = model.__dict__.get(held)
    if inplace:
        if own is not None:
            model.__dict__[FORWARD] = model.__dict__.pop(held)
        model.__dict__[KEY] = manager
        model.__class__ = cls
        return model
    new = object.__new__(cls)
    new.__dict__.update(model.__dict__)
    for name, value in model.__dict__.items():
        if "hooks" in name and isinstance(value, dict):
            new.__dict__[name] = copy.copy(value)
    if own is not None:
        new.__dict__[FORWARD] = _bound_to(new.__dict__.pop(held), model, new)
    new.__dict__[KEY] = manager
    for entries in manager.plans.values():
        for entry in entries:
            entry.pattern, entry.view = entry.view, None
            entry.look_at(new)
    return new


def _bound_to(function: Any, old: nn.Module, new: nn.Module) -> Any:
    """A method of one object as a method of another; anything else as it is."""
    if isinstance(function, types.MethodType) and function.__self__ is old:
        return types.MethodType(function.__func__, new)
    return function


def plain_forward(model: nn.Module) -> Callable[..., Any]:
    """The forward that the model had before it was managed, or has."""
    for key in (FORWARD, "forward") if KEY not in model.__dict__ else (FORWARD,):
        if key in model.__dict__:
            return model.__dict__[key]  # type: ignore[no-any-return]
    return functools.partial(plain_class(model).forward, model)


def run_call(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    manager: Manager = model.__dict__[KEY]
    manager.clock += 1
    tensors, structure = split((args, kwargs))
    entries = manager.plans.get(call_signature(tensors, structure))
    reason = "arguments that were not planned (shapes, dtypes, values, grad mode or autocast)"
    for entry in entries or ():
        view = entry.view or entry.look_at(model)
        state = view.tensors()
        why = view.miss(state)
        if why is None:
            why = view.changed(functools.partial(_is_unread, manager, model, entry, args, kwargs))
        if why is None:
            why = entry.plan.runner.broken_assumption(state, tensors)
        if why is None:
            runner = entry.plan.runner
            if runner.wanted is not None:
                _adopt(manager, entry, state, tensors)
            follow_watch(manager, entry)
            entry.used = manager.clock
            return _run(model, entry.plan, state, tensors)
        reason = why
    return _missed(model, manager, args, kwargs, reason)


def captured_call(loss_fn: Callable[..., Any] | None) -> Callable[..., Any]:
    """What a plan covers: the model's own forward, and the loss where one was given."""

    def call(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if loss_fn is None:
            return plain_forward(model)(*args, **kwargs)
        loss_args = kwargs.pop(LOSS_ARGS, ())
        return loss_fn(plain_forward(model)(*args, **kwargs), *loss_args)

    return call


def with_loss_args(
    model: nn.Module,
    kwargs: Mapping[str, Any] | None,
    loss_fn: Callable[..., Any] | None,
    loss_args: Sequence[Any] | None,
) -> dict[str, Any]:
    """The keyword arguments of a managed call that hands `loss_args` to the loss."""
    given = dict(kwargs or {})
    if loss_args is None:
        return given
    if loss_fn is None:
        raise TypeError("loss_args were given without loss_fn; give loss_fn=, which gets them")
    if isinstance(loss_args, torch.Tensor):
        raise TypeError("loss_args is a tensor; expected a tuple, such as loss_args=(target,)")
    if LOSS_ARGS in inspect.signature(plain_forward(model)).parameters:
        raise TypeError(
            f"{type(model).__name__}.forward has an argument loss_args of its own, which is what a "
            "managed call hands to loss_fn; call the loss inside of forward, or rename the argument"
        )
    return {**given, LOSS_ARGS: tuple(loss_args)}


def _is_unread(
    manager: Manager,
    model: nn.Module,
    entry: Entry,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    settings: Settings,
    name: str,
) -> bool:
    """Whether forward does without this attribute: captured without it, or with its new value where
    its class has a default, it is the same."""
    owner = settings.owner
    if name not in vars(owner):
        return False
    value = vars(owner)[name]
    if not settings.has_default(name):
        del vars(owner)[name]
    try:
        joint = manager.record(model, args, kwargs)
        planned = entry.plan.joint.recorded
        if (joint.tangents, joint.autocast) != (planned.tangents, planned.autocast):
            joint = joint.with_tangents(planned.tangents, planned.autocast)
        return joint.is_like(planned)
    except Exception:  # it does read it
        return False
    finally:
        setattr(owner, name, value)


def _adopt(
    manager: Manager, entry: Entry, state: list[torch.Tensor], tensors: list[torch.Tensor]
) -> None:
    """The last backward got other gradients than planned: plan for those from now on."""
    runner = entry.plan.runner
    wanted, runner.wanted = runner.wanted, None
    named = resident_tensors(wanted.joint, state, tensors)
    try:
        plan = manager.plan_joint(wanted.joint, entry.plan, named, same_ops=wanted.twin is not None)
    except BudgetInfeasible as error:
        _say(
            manager,
            f"gradients arrived for other outputs than planned, and for those there is {error}",
        )
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
    waits = manager.first is None
    without_gradients = not torch.is_grad_enabled() and manager.plans_gradients
    if without_gradients and (waits or manager.on_miss == "replan"):
        # Nothing is kept for a backward: eager needs less than the training that was planned.
        log.info("this call runs eagerly: %s", reason)
    elif waits or manager.on_miss == "replan":
        plan = manager.make_plan(model, args, kwargs, plan_of(model))
        entry = manager.add(model, plan, args, kwargs)
        tensors, _ = split((args, kwargs))
        follow_watch(manager, entry)
        _tell(manager, plan, tensors)
        return _run(model, plan, entry.look_at(model).tensors(), tensors)
    elif manager.on_miss == "raise":
        raise PlanMismatch(
            f"no plan covers this call: {reason}; make a plan for it, or use on_miss='replan'"
        )
    else:
        _say(manager, f"this call runs eagerly and may exceed the budget: {reason}")
    return captured_call(manager.loss_fn)(model, *args, **kwargs)


def _tell(manager: Manager, plan: Plan, tensors: Sequence[torch.Tensor]) -> None:
    shapes = ", ".join("x".join(map(str, t.shape)) or "scalar" for t in tensors[:4])
    log.warning(
        "planned call %d of at most %d (%s%s): peak %s -> %s, overhead %+.1f %%",
        len(manager.entries),
        manager.max_plans,
        shapes,
        ", ..." if len(tensors) > 4 else "",
        shown_size(plan.keep_all_peak_bytes),
        shown_size(plan.peak_bytes),
        100 * plan.overhead,
    )


def _say(manager: Manager, what: str) -> None:
    if what not in manager.said:
        manager.said.add(what)
        warnings.warn(f"rekindle: {what}", MissedPlanWarning, stacklevel=5)
