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
import random
import sys
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from rekindle.errors import BudgetInfeasible, CaptureError, PlanMismatch
from rekindle.frontend import LOSS_ARGS, Call, as_loss_args, call_of, raised_while_read
from rekindle.runtime.measured_step import sample_of
from rekindle.runtime.plan_corrections import follow_watch, shown_size
from rekindle.runtime.plan_table import (
    AnswerChanged,
    Entry,
    FamilyEntry,
    Manager,
    input_layouts,
)
from rekindle.torch_compat import transform_around

KEY = "_rekindle"
FORWARD = "_rekindle_forward"  # a forward that the object had of its own, beside its class's
log = logging.getLogger("rekindle")


class MissedPlanWarning(UserWarning):
    """A managed module ran a call without a plan."""


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
    plan = _Told(lambda manager: _first_plan(manager))
    plans = _Told(lambda manager: manager.plans)

    def __init_subclass__(cls) -> None:
        """A registry of subclasses that the model's class keeps is not told of managed ones."""

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


def _first_plan(manager: Manager) -> Any:
    if manager.regions is not None:
        return manager.regions.plan
    return None if manager.first is None else manager.first.plan


@functools.cache
def managed_class(cls: type[nn.Module]) -> type[nn.Module]:
    """The subclass of a model's class whose `forward` looks for a plan first."""

    @functools.wraps(cls.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return run_call(self, args, kwargs)

    forward._torchdynamo_disable = True  # type: ignore[attr-defined]

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
    """Whether the module already runs by plans."""
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
    if own is not None:
        new.__dict__[FORWARD] = _bound_to(new.__dict__.pop(held), model, new)
    new.__dict__[KEY] = manager
    return new


def _bound_to(function: Any, old: nn.Module, new: nn.Module) -> Any:
    """A method of one object as a method of another; anything else as it is."""
    if isinstance(function, types.MethodType) and function.__self__ is old:
        return types.MethodType(function.__func__, new)
    return function


def plain_forward(model: nn.Module) -> Callable[..., Any]:
    """The forward that the model had before it was managed, or has."""
    if KEY not in model.__dict__:
        return model.forward  # type: ignore[no-any-return]
    if FORWARD in model.__dict__:
        return model.__dict__[FORWARD]  # type: ignore[no-any-return]
    cls = plain_class(model)
    if hasattr(cls, "__del__"):
        return functools.partial(cls.forward, model)
    # An object of the plain class over the same attributes: to forward, `type(self)` is its class.
    plain = object.__new__(cls)
    object.__setattr__(plain, "__dict__", model.__dict__)
    # The class's: on the object there may be one that calls the managed module's.
    return cls.forward.__get__(plain, cls)  # type: ignore[no-any-return]


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
    if LOSS_ARGS in inspect.signature(plain_forward(model)).parameters:
        raise TypeError(
            f"{type(model).__name__}.forward has an argument loss_args of its own, which is what a "
            "managed call hands to loss_fn; call the loss inside of forward, or rename the argument"
        )
    return {**given, LOSS_ARGS: as_loss_args(loss_args)}


def run_call(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs a call by the plan that covers it, or does what `on_miss` says where none does. One
    whose forward raises, as is found where it is read, raises as eager would: after what comes
    before in it."""
    manager: Manager = model.__dict__[KEY]
    call = call_of(plain_forward(model), args, kwargs, manager.loss_fn)
    try:
        return _run_call(model, manager, call)
    except Exception as error:
        if not raised_while_read(error):
            raise
    return call.eager()


def _run_call(model: nn.Module, manager: Manager, call: Call) -> Any:
    around = transform_around()
    if manager.regions is not None:
        return manager.regions.run(model, call)
    if around:
        return _missed(model, manager, call, around, plannable=False)
    scope, reason = call.scope, None
    for entry in manager.entries:
        if entry.covers(scope):
            try:
                return _run(manager, entry, scope)
            except AnswerChanged as changed:
                reason = str(changed)
                if not isinstance(entry, FamilyEntry):
                    break
            except BudgetInfeasible as error:
                return _no_plan(manager, call, error)
    if torch.is_grad_enabled() is manager.plans_gradients:
        found = None if reason else manager.read_again(model, call)
        if found is None:
            found = _family_for(model, manager, call)
        if found is None and reason is None and manager.has_filled(call):
            manager.num_filled += 1
            log.info("planning again: the first call has changed what forward reads")
            plan = manager.make_plan(model, call.args, call.keywords, plan_of(model))
            found = manager.add(plan, call.args, call.keywords)
        if found is not None:
            try:
                return _run(manager, found, scope)
            except BudgetInfeasible as error:
                return _no_plan(manager, call, error)
    return _missed(model, manager, call, reason)


def _family_for(model: nn.Module, manager: Manager, call: Call) -> Entry | None:
    try:
        return manager.family_for(model, call)
    except BudgetInfeasible as error:
        if manager.on_miss != "eager":
            raise
        log.warning("no plan for changing sizes: %s", error)
        return None


def _no_plan(manager: Manager, call: Call, error: BudgetInfeasible) -> Any:
    """A call of a family's, of sizes for which no schedule is within the budget."""
    if manager.on_miss != "eager":
        raise error
    say(manager, f"this call runs eagerly and exceeds the budget: {error}")
    return call.eager()


def _run(manager: Manager, entry: Entry, scope: dict[str, Any]) -> Any:
    entry.prepare()
    follow_watch(manager, entry)
    other = entry.plan.runner.wanted is not None
    entry.before = functools.partial(_adopt, manager, entry) if other else None
    entry.scope = scope if entry.guards.has_later_reads else None
    manager.use(entry)
    state = random.getstate() if entry.may_turn_back else None
    try:
        out = entry.call(**scope)
    except AnswerChanged:
        if state is not None:
            random.setstate(state)  # eager will draw the same numbers
        raise
    if not entry.has_run:
        entry.has_run = True
        entry.unsettles = not entry.guards.check(scope)
    return out


def _adopt(manager: Manager, entry: Entry, inputs: Sequence[torch.Tensor]) -> None:
    """The last backward got other gradients than planned: plan for those from now on."""
    runner = entry.plan.runner
    wanted, runner.wanted = runner.wanted, None
    sample, same_ops = sample_of(wanted.joint, inputs), wanted.twin is not None
    try:
        if isinstance(entry, FamilyEntry):
            entry.family = entry.family.for_gradients(wanted.joint, entry.sizes, sample)
            return
        plan = manager.plan_joint(wanted.joint, entry.plan, sample, same_ops=same_ops)
    except BudgetInfeasible as error:
        say(
            manager,
            f"gradients arrived for other outputs than planned, and for those there is {error}",
        )
        return
    entry.plan = plan


def _missed(
    model: nn.Module, manager: Manager, call: Call, reason: str | None, plannable: bool = True
) -> Any:
    waits = manager.first is None and plannable
    without_gradients = not torch.is_grad_enabled() and manager.plans_gradients
    if without_gradients and (waits or manager.on_miss == "replan"):
        # Nothing is kept for a backward: eager needs less than the training that was planned.
        log.info("this call runs eagerly: it needs no gradients")
    elif waits or (manager.on_miss == "replan" and plannable):
        try:
            plan = manager.make_plan(model, call.args, call.keywords, plan_of(model))
        except CaptureError as error:
            if manager.first is not None or manager.in_regions is None:
                raise
            manager.regions = manager.in_regions(model, error)
            return manager.regions.run(model, call)
        entry = manager.add(plan, call.args, call.keywords)
        _tell(manager, plan, call)
        try:
            return _run(manager, entry, call.scope)
        except AnswerChanged as changed:
            raise PlanMismatch(f"this call cannot be planned: {changed}") from None
    else:
        why = reason or manager.difference(call)  # where no plan stands yet, there is a reason
        if manager.on_miss == "raise":
            raise PlanMismatch(
                f"no plan covers this call: {why}; make a plan for it, or use on_miss='replan'"
            )
        say(manager, f"this call runs eagerly and may exceed the budget: {why}")
    return call.eager()


def _tell(manager: Manager, plan: Any, call: Call) -> None:
    shapes = [str(layout) for layout in input_layouts(call.args, call.keywords).values()]
    log.warning(
        "planned call %d of at most %d (%s%s): peak %s -> %s, overhead %+.1f %%",
        len(manager.plans),
        manager.max_plans,
        ", ".join(shapes[:4]),
        ", ..." if len(shapes) > 4 else "",
        shown_size(plan.keep_all_peak_bytes),
        shown_size(plan.peak_bytes),
        100 * plan.overhead,
    )


def say(manager: Manager, what: str) -> None:
    """Warns once of what a managed module does otherwise than planned."""
    if what not in manager.said:
        manager.said.add(what)
        warnings.warn(f"rekindle: {what}", MissedPlanWarning, stacklevel=_callers_level())


def _callers_level() -> int:
    """The stack level of the line that called the model: the first outside of torch and Rekindle,
    as seen from who calls this."""
    level, frame = 1, sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.split(".")[0] not in ("torch", "rekindle"):
            return level
        level, frame = level + 1, frame.f_back  # type: ignore[assignment]
    return 1
