"""Golden plans: captured models, from their problem to the code that runs.

`facts_of_plan` is the one place that reads the insides of a plan; `gpu.py` uses it too.
"""

import contextlib
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import fx

from golden.models import MODELS, Sample
from golden.solving import NO_CLOCK_S
from rekindle import BudgetInfeasible, plan
from rekindle.capture.node_facts import facts
from rekindle.core import Schedule, keep_all
from rekindle.core.files import problem_record
from rekindle.solve.anneal.fastsa import FastSA

FRACTIONS = (1.0, 0.6)
# No plan is found for these at the lower fraction.
NOT_SO_LOW = {"t5": 0.85, "recurrent": 0.85, "gpt2": 0.8}
SEARCH = FastSA(num_moves=20_000, num_seeds=1)
DEVICE = "cpu"  # the shipped description that costs are estimated for
READABLE = ("mlp/0.6", "encoder/0.6")  # whose code is kept as text
FUSED = ("encoder", "language", "convolutions", "gpt2", "t5")
# Of a plan file: the releases, and what reports say about how the plan was made.
_VOLATILE = ("rekindle", "torch", "made_by", "inputs", "residents", "device_bytes")


def plans() -> dict[str, dict[str, Any]]:
    """Per model and budget, as eager's ops are on a CPU."""
    return {
        f"{name}/{fraction}": planned(factory(), fraction)
        for name, factory in MODELS.items()
        for fraction in (*FRACTIONS, *([NOT_SO_LOW[name]] if name in NOT_SO_LOW else ()))
    }


def fused_plans() -> dict[str, dict[str, Any]]:
    """The same with the rewrites for a GPU, which on a CPU are run by the separate ops."""
    with rewrites_anywhere():
        return {
            f"{name}/{fraction}": planned(MODELS[name](), fraction)
            for name in FUSED
            for fraction in [NOT_SO_LOW.get(name, 0.6)]
        }


def planned(sample: Sample, fraction: float) -> dict[str, Any]:
    """The plan of a sample as facts; of one without a plan within the budget, why."""
    model, args, kwargs = sample
    how = {"profile": "estimate", "device_profile": DEVICE, "cache": False}
    try:
        found = plan(
            model, args, kwargs, budget=fraction, solver=SEARCH, time_limit_s=NO_CLOCK_S, **how
        )
    except BudgetInfeasible as error:
        whole = plan(model, args, kwargs, schedule=keep_all, **how)
        return {"infeasible": str(error), **facts_of_plan(whole)}
    return facts_of_plan(found)


def facts_of_plan(found: Any) -> dict[str, Any]:
    """All that a plan is, from the graph to the emitted code and the reports."""
    schedule: Schedule = found.schedule
    predicted = found.predict()
    lowered = found.runner.lowered
    return {
        "peak": found.peak_bytes,
        "cost": found.cost_ns,
        "keep_all_peak": found.keep_all_peak_bytes,
        "num_ops": len(found.problem.ops),
        "predicted": [predicted.peak_bytes, predicted.step_ns],
        "graph": graph_text(found.joint),
        "problem": as_text(problem_record(found.problem)),
        "schedule": list(schedule.ops),
        "code": "\n".join([lowered.forward_source, *(s.source for s in lowered.stretches)]),
        "plan_file": as_text(_plan_file(found)),
        "account": as_text(found.account().record()),
        "explain": found.explain(),
    }


def as_text(record: Any) -> str:
    return json.dumps(record, indent=1, sort_keys=True)


def graph_text(joint: Any) -> str:
    """The recorded ops with their arguments, by number, and what they make."""
    number = {node: f"%{i}" for i, node in enumerate(joint.nodes)}

    def told(arg: Any) -> Any:
        # A node that was dropped can still be an argument of what nobody runs.
        return _Plain(number.get(arg, f"dropped {arg}"))

    lines = []
    for node in joint.nodes:
        target = node.target
        name = str(target) if isinstance(target, (str, torch._ops.OpOverload)) else ""
        name = name or getattr(target, "__name__", type(target).__name__)
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), told)
        val = facts(node).value
        shape = ""
        if isinstance(val, torch.Tensor):
            shape = f"{val.dtype}{list(val.shape)}{list(val.stride())}"
        lines.append(f"{number[node]} = {name}({args}, {dict(kwargs)}) {shape}")
    outputs = [str(told(node)) for node in joint.outputs]
    gradients = [(str(told(a)), str(told(b))) for a, b in joint.gradients]
    return "\n".join([*lines, f"outputs {outputs}", f"gradients {gradients}"])


class _Plain(str):
    """Text that is shown without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _plan_file(found: Any) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        found.save(path)
        record = json.loads(path.read_text("utf-8"))
    return {key: value for key, value in record.items() if key not in _VOLATILE}


@contextlib.contextmanager
def rewrites_anywhere() -> Iterator[None]:
    """Chains of ops are joined whatever their size, on a CPU too. Each switch is looked for by its
    name, wherever the module that has it is."""
    switches = {"MIN_NUMEL": 64, "ANYWHERE": True, "_targets": {}}
    with contextlib.ExitStack() as stack:
        for switch, value in switches.items():
            stack.enter_context(_switched(switch, value))
        yield


@contextlib.contextmanager
def _switched(switch: str, value: Any) -> Iterator[None]:
    holders = [
        vars(module)
        for name, module in sorted(sys.modules.items())
        if name.startswith("rekindle.") and switch in vars(module)
    ]
    assert len(holders) == 1, f"{len(holders)} modules have {switch}"
    [module] = holders
    before = module[switch]
    module[switch] = value
    try:
        yield
    finally:
        module[switch] = before
