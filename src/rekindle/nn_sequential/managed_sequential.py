"""Rotor for an `nn.Sequential`: no graph capture, so it works where capture cannot.

`sequential(model, sample, budget=...)` measures each stage on the sample (`stage_profile`), finds
the best sequence of bare runs, saving runs and backward runs within the budget (`solve.chains`),
and returns a module of the same class, parameters and state_dict that runs it: bare runs under
no_grad, saving runs under autograd itself. Random numbers, buffers and autocast are the same in a
second run as in the first, and are left as one run leaves them.

The budget counts what the model's forward and backward add to what is there: activations,
gradients (the parameters' included), temporaries. What the loss needs is the caller's.
A call that the plan does not cover runs as the plain model, and says so once.
"""

import contextlib
import copy
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from rekindle.core import parse_budget
from rekindle.errors import BudgetInfeasible, CaptureError
from rekindle.nn_sequential.stage_profile import (
    Unit,
    generator_states,
    generators_kept,
    measure,
    set_generator_states,
)
from rekindle.nn_sequential.stage_values import detached, map_tensors, tensors_of
from rekindle.partition.chain import Chain
from rekindle.solve.chains.chain_dp import ChainSequence, Rule, Run, Step, best_sequence

RULES = {"rotor": Rule.persistent, "rotor-floating": Rule.floating, "revolve": Rule.revolve}
SLOTS = 4000
ADDS = 10**9  # the most work the chain program may take: a second or so


@dataclass(frozen=True, slots=True)
class SequentialPlan:
    """What was planned: by the measured numbers, not yet by a run."""

    units: tuple[Unit, ...]
    steps: tuple[Step, ...]
    chain: Chain
    budget_bytes: int
    keep_all_peak_bytes: int
    cost_ns: int
    keep_all_cost_ns: int
    signature: tuple[Any, ...]

    @property
    def overhead(self) -> float:
        """The planned cost increase over keeping everything: 0.07 is 7 %."""
        return self.cost_ns / max(1, self.keep_all_cost_ns) - 1


def sequential(
    model: nn.Sequential, sample: Any, *, budget: int | float | str, solver: str = "rotor"
) -> nn.Sequential:
    """The same model within the budget; raises BudgetInfeasible, with the least bytes that do."""
    if not isinstance(model, nn.Sequential) or type(model).forward is not nn.Sequential.forward:
        raise CaptureError(
            f"expected an nn.Sequential with its own forward, got {type(model).__name__}; use "
            "rekindle.rematerialize for other models"
        )
    if solver not in RULES:
        raise ValueError(f"there is no chain solver {solver!r}; the chain solvers: {[*RULES]}")
    if len(model) == 0:
        raise CaptureError("the nn.Sequential has no stages")
    units, chain = measure(model, sample)
    keep_all_peak = _keep_all_peak(chain)
    budget_bytes = parse_budget(budget, keep_all_peak)
    # The program's work grows with the cube of the length: a long chain gets coarser slots of
    # memory.
    slots = min(SLOTS, max(500, 6 * ADDS // len(chain) ** 3))
    # Slots round sizes up, so the program might refuse what fits by a few bytes.
    if budget_bytes >= keep_all_peak:
        sequence: ChainSequence | None = _keep_all(chain)
    else:
        sequence = best_sequence(chain, budget_bytes, RULES[solver], slots=slots)
    if sequence is None:
        least = _least_bytes(chain, keep_all_peak, RULES[solver], slots)
        raise BudgetInfeasible(
            f"no sequence of stages fits {budget_bytes} bytes; the smallest that does needs "
            f"{least}, and keeping everything needs {keep_all_peak}",
            least,
        )
    plan = SequentialPlan(
        units=units,
        steps=sequence.steps,
        chain=chain,
        budget_bytes=budget_bytes,
        keep_all_peak_bytes=keep_all_peak,
        cost_ns=sequence.cost,
        keep_all_cost_ns=_keep_all(chain).cost,
        signature=_signature(model, sample),
    )
    return _managed(model, plan)


def _keep_all(chain: Chain) -> ChainSequence:
    steps: list[Step] = [(Run.save, k, 0) for k in range(len(chain))]
    steps += [(Run.back, k, 0) for k in reversed(range(len(chain)))]
    return ChainSequence(tuple(steps), sum(b.options[0].cost for b in chain.blocks))


def _keep_all_peak(chain: Chain) -> int:
    before = peak = 0
    arriving = chain.blocks[-1].standing
    for block in chain.blocks:
        option = block.options[0]
        peak = max(
            peak,
            before + arriving + option.forward_peak,
            before + block.standing + option.backward_peak,
        )
        before += option.saved
    return peak


def _least_bytes(chain: Chain, keep_all_peak: int, rule: Rule, slots: int) -> int:
    # By bisection to a thousandth: feasibility only grows with the budget.
    low, high = 0, keep_all_peak  # which is known to do
    while high - low > high // 1000 + 1:
        middle = (low + high) // 2
        if best_sequence(chain, middle, rule, slots=min(slots, 500)) is None:
            low = middle
        else:
            high = middle
    return high


def _managed(model: nn.Sequential, plan: SequentialPlan) -> nn.Sequential:
    """A module object of its own that shares parameters, buffers, stages and hooks."""
    managed = copy.copy(model)
    kind = type(model)
    if kind is nn.Sequential:
        managed.__class__ = ManagedSequential
    else:
        # A subclass keeps its methods, and `isinstance` still holds.
        managed.__class__ = type(kind.__name__, (ManagedSequential, kind), {})
    # On the copy alone, and past nn.Module, which looks at all that it is given.
    object.__setattr__(managed, "plan", plan)
    object.__setattr__(managed, "_told", False)
    return managed


class ManagedSequential(nn.Sequential):  # type: ignore[misc]
    """An nn.Sequential that runs its plan where it applies, and plainly elsewhere."""

    plan: SequentialPlan | None = None  # none on slices, which make new modules of the class
    _told: bool = False

    def forward(self, input: Any) -> Any:
        plan = self.plan
        if plan is None or not torch.is_grad_enabled():
            return super().forward(input)
        if _signature(self, input) != plan.signature:
            if not self._told and self.training:
                object.__setattr__(self, "_told", True)
                warnings.warn(
                    "this call differs from the sample that the plan was made for (shapes, "
                    "dtypes, requires_grad or training flags); it runs without the plan and may "
                    "exceed the budget",
                    stacklevel=2,
                )
            return super().forward(input)
        parameters = list({id(p): p for unit in plan.units for p in unit.parameters}.values())
        inputs = tensors_of(input)
        # Nothing wants a gradient: autograd would save nothing, and there is no backward to plan
        # for.
        if not parameters and not any(t.requires_grad for t in inputs):
            return super().forward(input)
        walk = _Walk(plan, input, parameters)
        # Parameters are arguments so that autograd sees them: their gradients leave through it,
        # hooks and accumulation included.
        results = _RunPlan.apply(walk, *inputs, *parameters)
        tensors = iter(results)
        return map_tensors(lambda _: next(tensors), walk.pattern)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Sequential:
        """A copy has other parameters than the plan's: it is the plain model, to be planned."""
        plain = copy.copy(self)
        plain.__class__ = nn.Sequential
        plain.__dict__.pop("plan", None)
        plain.__dict__.pop("_told", None)
        return copy.deepcopy(plain, memo)


def _signature(model: nn.Module, value: Any) -> tuple[Any, ...]:
    tensors = tuple((tuple(t.shape), t.dtype, t.device, t.requires_grad) for t in tensors_of(value))
    flags = tuple(module.training for child in model.children() for module in child.modules())
    needs = tuple(p.requires_grad for p in model.parameters())
    return tensors, flags, needs


class _Walk:
    """One forward and backward along the steps of a plan."""

    def __init__(
        self, plan: SequentialPlan, value: Any, parameters: Sequence[nn.Parameter]
    ) -> None:
        self.plan = plan
        self.parameters = parameters
        self.value = value
        self.pattern: Any = None  # of the result
        # The step at which the backward begins.
        self.turn = next(k for k, (run, _, _) in enumerate(plan.steps) if run == Run.back)
        tensors = tensors_of(value)
        self.device = tensors[0].device if tensors else torch.device("cpu")
        self.activations: dict[int, Any] = {}  # the input of each unit that is there
        self.saved: dict[int, tuple[Any, Any]] = {}  # per saved unit: its leaf input, its output
        self.generators: dict[int, tuple[torch.Tensor, ...]] = {}
        self.buffers: dict[int, list[torch.Tensor]] = {}
        self.ran: set[int] = set()
        self.gradients: dict[int, torch.Tensor] = {}  # by the id of the parameter
        kinds = {"cpu", self.device.type}
        self.autocast = {
            kind: torch.get_autocast_dtype(kind)
            for kind in kinds
            if torch.is_autocast_enabled(kind)
        }

    def forward(self) -> tuple[torch.Tensor, ...]:
        self.activations[0] = self.value
        self.value = None
        for step in self.plan.steps[: self.turn]:
            self._forward_step(*step)
        last = len(self.plan.units) - 1
        _, output = self.saved[last]
        # The nesting of the result without its memory.
        self.pattern = map_tensors(lambda t: t.new_empty(0), output)
        self.activations.pop(last + 1)
        return tuple(t.detach() for t in tensors_of(output))

    def backward(self, arriving: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """The gradients of the input's tensors; those of the parameters are in `gradients`."""
        gradients = list(arriving)
        for run, k, option in self.plan.steps[self.turn :]:
            if run == Run.back:
                gradients = self._backward_step(k, gradients)
            else:
                self._forward_step(run, k, option)
        return gradients

    def _forward_step(self, run: Run, k: int, _option: int) -> None:
        x = self.activations[k]
        if run == Run.save:
            leaf = detached(x)
            with torch.enable_grad():
                y = self._run(k, leaf)
            self.saved[k] = (leaf, y)
            self.activations[k + 1] = detached(y)
            return
        with torch.no_grad():
            y = self._run(k, x)
        # Whether autograd would want a gradient for the result; at worst one too many is made.
        needs = bool(self.plan.units[k].parameters) or any(t.requires_grad for t in tensors_of(x))
        self.activations[k + 1] = map_tensors(
            lambda t: t.detach().requires_grad_(
                needs and (t.is_floating_point() or t.is_complex())
            ),
            y,
        )
        if run == Run.drop:
            del self.activations[k]

    def _backward_step(
        self, k: int, arriving: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        leaf, y = self.saved.pop(k)
        unit = self.plan.units[k]
        # Inputs of later units have served: their backward has run.
        for later in [j for j in self.activations if j > k]:
            del self.activations[later]
        pairs = [
            (t, g)
            for t, g in zip(tensors_of(y), arriving, strict=True)
            if t.requires_grad and g is not None
        ]
        del y
        inputs = [t for t in tensors_of(leaf) if t.requires_grad]
        wanted = [*inputs, *unit.parameters]
        made: list[torch.Tensor | None] = [None] * len(wanted)
        if pairs and wanted:
            outputs, given = [t for t, _ in pairs], [g for _, g in pairs]
            del pairs
            # Not `backward()`: it would add to `.grad` behind the back of the caller's autograd.
            made = list(torch.autograd.grad(outputs, wanted, given, allow_unused=True))
        for parameter, gradient in zip(unit.parameters, made[len(inputs) :], strict=True):
            if gradient is not None:
                before = self.gradients.get(id(parameter))
                total = gradient if before is None else before + gradient
                self.gradients[id(parameter)] = total
        if k > 0:
            self.activations.pop(k, None)
        found = iter(made[: len(inputs)])
        return [next(found) if t.requires_grad else None for t in tensors_of(leaf)]

    def _run(self, k: int, x: Any) -> Any:
        unit = self.plan.units[k]
        with contextlib.ExitStack() as stack:
            for kind, dtype in self.autocast.items():
                # Weights cast under no_grad must not be found again by a run with autograd.
                stack.enter_context(
                    torch.autocast(device_type=kind, dtype=dtype, cache_enabled=False)
                )
            # The first run is eager's: it draws from the stream and moves running statistics. Any
            # other starts from the same state and leaves no trace.
            if k not in self.ran:
                self.ran.add(k)
                if unit.draws:
                    self.generators[k] = generator_states(self.device, unit.generators)
                if unit.changes_buffers:
                    self.buffers[k] = [b.clone() for _, _, b in unit.buffers]
            else:
                if unit.draws:
                    own = unit.generators
                    stack.enter_context(generators_kept(self.device, own))
                    set_generator_states(self.device, own, self.generators[k])
                if unit.changes_buffers:
                    stack.enter_context(_other_buffers(unit, self.buffers[k]))
            return unit(x)


@contextlib.contextmanager
def _other_buffers(unit: Unit, values: Sequence[torch.Tensor]) -> Iterator[None]:
    """The unit reads and changes copies; its own buffers stay, and so does what refers to them."""
    own = unit.buffers
    try:
        for (module, name, _), value in zip(own, values, strict=True):
            setattr(module, name, value.clone())
        yield
    finally:
        for module, name, buffer in own:
            setattr(module, name, buffer)


class _RunPlan(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, walk: _Walk, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.walk = walk
        results = walk.forward()
        _, output = walk.saved[len(walk.plan.units) - 1]
        plain = [r for r, t in zip(results, tensors_of(output), strict=True) if not t.requires_grad]
        ctx.mark_non_differentiable(*plain)
        return results

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *arriving: torch.Tensor | None) -> tuple[Any, ...]:
        walk: _Walk | None = ctx.walk
        if walk is None:
            raise RuntimeError(
                "backward a second time through a managed nn.Sequential: its activations were "
                "freed as the first one went along"
            )
        ctx.walk = None
        gradients = walk.backward(arriving)
        own = [walk.gradients.get(id(p)) for p in walk.parameters]
        return (None, *gradients, *own)
