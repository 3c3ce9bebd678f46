"""The regions of one managed model: which submodules are, and how their calls run.

While the model's own forward runs, submodules that are regions, or not known yet, have another
`forward` on the object, for the time of the call alone. It looks for a region whose guards hold.
Where there is none it tries to read the call: what can be read becomes a region, what cannot runs
as it is, and its children are looked at in turn. The first training step is recorded
(`Recording`); until a plan is there, each region keeps only its inputs.
"""

import functools
import gc
import logging
import random
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from rekindle.capture.pytrees import split
from rekindle.errors import CaptureError, InvalidProblem, InvalidSchedule, PlanMismatch
from rekindle.frontend import Call
from rekindle.runtime.plan_table import AnswerChanged, Layout, input_layouts
from rekindle.runtime.regions.kinds import MadeRegion, RegionKind
from rekindle.runtime.regions.recording import RecordedCall, Recording
from rekindle.runtime.runner import Runner
from rekindle.solve.regions import Key, RegionOption, StepProblem, eager_option, group_of
from rekindle.torch_compat import (
    outside_modes,
    run_saved_regions_plainly,
    transform_around,
)

log = logging.getLogger("rekindle")

MakeRegion = Callable[[nn.Module, Call], MadeRegion]

_MOST_KINDS = 16  # read for one module: what it gets besides tensors, such as a cache, varies


class Regions:
    """The regions of one managed model, and the plan for all of them."""

    def __init__(
        self,
        whole: str,
        make_region: MakeRegion,
        make_plan: Callable[["Regions", Recording], Any],
        on_miss: str,
        warn: Callable[[str], None],
    ) -> None:
        self.whole = whole  # why the model is not planned in one piece
        self.plan: Any = None
        self.planned: dict[Key, RegionOption] = {}
        # What planning knows: ways through the model, and menus by problem.
        self.steps: list[StepProblem] = []
        self.menus: dict[str, tuple[RegionOption, ...]] = {}
        self.kinds: list[RegionKind] = []
        self.kinds_of: dict[str, list[RegionKind]] = {}  # per path
        self.opaque: dict[str, str] = {}  # path -> why it is no region
        self.recording: Recording | None = None
        self._make_region, self._make_plan = make_region, make_plan
        self._on_miss, self._warn = on_miss, warn
        self._failed: dict[Any, str] = {}
        self._unplanned = True  # whether calls were seen that the plan does not know
        self._lock = threading.RLock()

    def __deepcopy__(self, memo: dict[int, Any]) -> "Regions":
        """A copied model learns its own: guards are about objects of the first one."""
        return Regions(self.whole, self._make_region, self._make_plan, self._on_miss, self._warn)

    def run(self, model: nn.Module, call: Call) -> Any:
        """A call of the whole model."""
        if not torch.is_grad_enabled() or transform_around():
            return call.eager()
        with self._lock:
            self._end_recording()
            recording = None
            if self._unplanned and self.recording is None:
                recording = self._begin_recording(model, call)
            # Checkpoints of the model become plain code: the plan says what is kept, and a region
            # that ran in one would be run again by it, under other hooks.
            with _Run(self, model, recording), run_saved_regions_plainly():
                if recording is None:
                    return call.eager()
                with recording.mode:
                    out = call.eager()
            self._returned(recording, out)
            return out

    # ---- learning

    def _begin_recording(self, model: nn.Module, call: Call) -> Recording:
        given, _ = split((call.args, call.keywords))
        tensors = [*model.parameters(), *model.buffers(), *given]
        tensors += [t.grad for t in model.parameters() if t.grad is not None]
        device = next((t.device for t in tensors), torch.device("cpu"))
        return Recording([t for t in tensors if _has_storage(t)], device)

    def _returned(self, recording: Recording, out: Any) -> None:
        if not recording.calls:
            raise CaptureError(f"{self.whole}; no part of the model that can be planned was found")
        tensors, _ = split(out)
        recording.returned(tensors)
        self.recording = recording

    def _end_recording(self) -> None:
        """Plans as soon as a whole step has been seen; until then the next one is waited for."""
        recording = self.recording
        if recording is None or recording.is_pending:
            return
        self.recording = None
        recording.close()
        if not recording.is_complete:
            return
        kinds = {id(call.kind): call.kind for call in recording.calls}.values()
        adopted = [kind.adopt() for kind in kinds]
        if not any(adopted):  # else the next step is recorded
            self._unplanned = False
            try:
                with outside_modes():
                    self.plan = self._make_plan(self, recording)
            except (InvalidProblem, InvalidSchedule) as error:
                self._warn(
                    "the step that was recorded cannot be planned, regions keep only their inputs, "
                    f"and steps may exceed the budget: {error}"
                )

    # ---- calls of submodules

    def find(self, path: str, module: nn.Module, call: Call) -> RegionKind | None:
        """The kind of this call; None where it is no region."""
        scope = call.scope
        known = self.kinds_of.setdefault(path, [])
        for kind in known:
            if kind.guards.check(scope):
                return kind
        cls = type(module)
        for kind in self.kinds:
            if kind.cls is cls and kind not in known and kind.guards.check(scope):
                known.append(kind)
                return kind
        layouts = _direct_layouts(call)
        if known and not self._may_read(path, known, layouts):
            return None
        return self._read(path, module, call, layouts)

    def _may_read(
        self, path: str, known: Sequence[RegionKind], layouts: Mapping[str, Layout]
    ) -> bool:
        if len(known) < _MOST_KINDS and any(kind.layouts == layouts for kind in known):
            return True
        if self._on_miss == "replan":
            return len(known) < _MOST_KINDS
        shapes = ", ".join(str(layout) for layout in layouts.values())
        why = f"{path or 'the model'} is called with ({shapes}), which is not planned"
        if self._on_miss == "raise":
            raise PlanMismatch(f"{why}; make a plan for it, or use on_miss='replan'")
        self._warn(f"a part of this call runs eagerly and may exceed the budget: {why}")
        return False

    def _read(
        self, path: str, module: nn.Module, call: Call, layouts: dict[str, Layout]
    ) -> RegionKind | None:
        mark = (type(module), tuple(layouts.items()), module.training)
        why = self._failed.get(mark) or _nothing_to_gain(module)
        if not why:
            try:
                with outside_modes():
                    kind = RegionKind(type(module), self._make_region(module, call), layouts)
                if eager_option(kind.problem).kept <= kind.default.kept:
                    why = "it keeps nothing for the backward that it could recompute"
                elif not kind.guards.check(call.scope):
                    why = "its guards do not hold for the call that it was read from"
            except Exception as error:  # eager will raise what is the model's own
                why = str(error) or type(error).__name__
            # Reading leaves cycles behind, which hold what it read: the step's activations.
            gc.collect()
        if why:
            self._failed[mark] = why
            if not self.kinds_of.get(path):
                self.opaque[path] = why
            log.debug("%s is no region: %s", path, why)
            return None
        self.kinds.append(kind)
        self.kinds_of[path].append(kind)
        return kind

    def option(self, kind: RegionKind, key: Key) -> RegionOption:
        """How a call runs: as planned, or keeping only its inputs until it is."""
        if key in self.planned:
            return self.planned[key]
        # A layer of a list in the place of another one, which this step leaves out.
        group, mark = group_of(key), key[2]
        alike = [
            option
            for other, option in self.planned.items()
            if group is not None and group_of(other) == group and other[2] == mark
        ]
        if alike and key[1] == 0:
            return min(alike, key=lambda option: option.kept)
        self._unplanned = True
        if self.plan is not None and self._on_miss == "raise":
            raise PlanMismatch(
                f"no plan covers this call: {key[0]} was not called like this in the planned "
                "steps; use on_miss='eager' or on_miss='replan'"
            )
        if self.plan is not None:
            self._warn(
                f"{key[0]} runs for the first time: it keeps only its inputs until it is planned, "
                "and this step may exceed the budget"
            )
        return kind.default


def _direct_layouts(call: Call) -> dict[str, Layout]:
    """Of the tensors among the arguments, not of those inside a cache, which may have been filled
    by fewer layers than when the call was read."""
    args = [a if isinstance(a, torch.Tensor) else None for a in call.args]
    kwargs = {k: a for k, a in call.kwargs.items() if isinstance(a, torch.Tensor)}
    return input_layouts(args, kwargs)


def _nothing_to_gain(module: nn.Module) -> str:
    """Layers of torch that are one op."""
    cls = type(module)
    leaf = next(module.children(), None) is None and not isinstance(module, nn.RNNBase)
    if leaf and cls.__module__.startswith("torch.nn.modules."):
        return "a layer of torch that is one op"
    return ""


def has_parts(model: nn.Module) -> bool:
    """Whether there is a submodule that may become a region."""
    return any(
        path and not _not_called(module) and not _nothing_to_gain(module)
        for path, module in model.named_modules()
    )


def _has_storage(tensor: torch.Tensor) -> bool:
    try:
        tensor.untyped_storage()
    except (RuntimeError, NotImplementedError):
        return False
    return True


class _Run:
    """One call of the model: `forward` of its submodules leads here while it lasts."""

    def __init__(self, regions: Regions, model: nn.Module, recording: Recording | None) -> None:
        self.regions, self.recording = regions, recording
        self._thread = threading.get_ident()
        self._counts: dict[str, int] = {}
        self._modules: dict[str, nn.Module] = {}
        self._own: dict[str, Any] = {}  # path -> what stood in the way of the class's forward
        inside = ""
        for path, module in model.named_modules():
            if not path or (inside and path.startswith(inside)):
                continue
            if path in regions.opaque or _not_called(module):
                continue
            self._modules[path] = module
            if regions.kinds_of.get(path):
                inside = f"{path}."

    def __enter__(self) -> None:
        self._put(self._modules)

    def __exit__(self, *_: object) -> None:
        self._take(list(self._own))

    def _put(self, paths: Iterable[str]) -> None:
        for path in paths:
            if path not in self._own and path not in self.regions.opaque:
                module = self._modules[path]
                self._own[path] = module.__dict__.get("forward")
                module.__dict__["forward"] = functools.partial(self._called, path)

    def _take(self, paths: Iterable[str]) -> None:
        for path in paths:
            if path not in self._own:
                continue
            own, table = self._own.pop(path), self._modules[path].__dict__
            if own is None:
                table.pop("forward", None)
            else:
                table["forward"] = own

    def _called(self, path: str, /, *args: Any, **kwargs: Any) -> Any:
        module = self._modules[path]
        if threading.get_ident() != self._thread or not torch.is_grad_enabled():
            own = self._own.get(path)
            forward = own or type(module).forward.__get__(module)
            return forward(*args, **kwargs)
        below = [p for p in self._own if p == path or p.startswith(f"{path}.")]
        self._take(below)
        try:
            forward = module.forward
            call = Call(forward, args, kwargs)
            kind = self.regions.find(path, module, call)
            if kind is not None:
                try:
                    return self._region(path, kind, call)
                except AnswerChanged as changed:
                    self.regions._warn(
                        f"a part of this call runs eagerly and may exceed the budget: {changed}"
                    )
            # As it is, and its children are looked at.
            self._put(p for p in below if p != path)
            return forward(*args, **kwargs)
        finally:
            self._put(below)

    def _region(self, path: str, kind: RegionKind, call: Call) -> Any:
        number = self._counts.get(path, 0)
        option = self.regions.option(kind, (path, number, kind.hash))
        recording = self.recording
        if recording is None:
            out = self._keeping_random(kind.callable(option, None), call)
        else:
            recorded = RecordedCall(kind, path, number)

            def ran(runner: Runner, outs: Sequence[Any]) -> None:
                recording.forward(recorded, runner, outs)

            with recording.paused():
                out = self._keeping_random(kind.callable(option, ran), call)
        self._counts[path] = number + 1
        return out

    @staticmethod
    def _keeping_random(function: Callable[..., Any], call: Call) -> Any:
        state = random.getstate()
        try:
            return function(**call.scope)
        except AnswerChanged:
            random.setstate(state)  # eager will draw the same numbers
            raise


def _not_called(module: nn.Module) -> bool:
    return isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict))
