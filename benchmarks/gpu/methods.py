"""What each method of the comparison makes of a model, and how a case of it is measured.

A record depends on this file and `models.py`, not on the script that decides what is run and when.
Whoever measures is alone on the device; who only uses it does so beside others.
"""

import argparse
import contextlib
import copy
import fcntl
import functools
import gc
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from models import MODELS, Workload

NUM_AGAIN = 3  # runs of eager that are compared with another


@contextlib.contextmanager
def alone(device: str) -> Iterator[None]:
    """Nothing else of this comparison runs on the device meanwhile."""
    with _locked(device, fcntl.LOCK_EX):
        yield


@contextlib.contextmanager
def beside_others(device: str) -> Iterator[None]:
    """The device may be used: nobody measures meanwhile."""
    with _locked(device, fcntl.LOCK_SH):
        yield


@contextlib.contextmanager
def _locked(device: str, kind: int) -> Iterator[None]:
    folder = Path(tempfile.gettempdir())
    with (
        (folder / "rekindle-device.door").open("w") as door,
        (folder / "rekindle-device.lock").open("w") as lock,
    ):
        fcntl.flock(door, fcntl.LOCK_EX)  # who waits to be alone lets no others in
        fcntl.flock(lock, kind)
        fcntl.flock(door, fcntl.LOCK_UN)
        yield
        if device.startswith("cuda"):
            torch.cuda.synchronize()


class NotApplicable(Exception):
    """The method does not exist for this model."""


def wrap_blocks(load: Workload, selective: bool) -> None:
    from torch.utils.checkpoint import (
        CheckpointPolicy,
        checkpoint,
        create_selective_checkpoint_contexts,
    )

    if load.blocks is None:
        raise NotApplicable("the model has no list of blocks")
    aten = torch.ops.aten
    heavy = {
        aten.mm.default, aten.bmm.default, aten.addmm.default, aten.convolution.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
    }  # fmt: skip

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in heavy else CheckpointPolicy.PREFER_RECOMPUTE

    more = {}
    if selective:
        more["context_fn"] = functools.partial(create_selective_checkpoint_contexts, policy)
    for block in load.blocks(load.model):
        inner = block.forward
        block.forward = functools.partial(checkpoint, inner, use_reentrant=False, **more)


def prepare(
    load: Workload, method: str, known: dict[str, Any], limit_s: float
) -> tuple[Any, dict[str, Any]]:
    """The model as the method wants it, and what to note about it."""
    name, _, setting = method.partition("@")
    match name:
        case "eager":
            return load.model, {}
        case "own":
            if load.enable_own is None:
                raise NotApplicable("the model has no switch of its own")
            load.enable_own(load.model)
            return load.model, {}
        case "blocks" | "sac":
            wrap_blocks(load, selective=name == "sac")
            return load.model, {}
        case "inductor":
            from torch._functorch import config

            config.activation_memory_budget = float(setting)
            return torch.compile(load.model), {}
        case "rekindle" | "graph":
            return prepare_rekindle(load, setting, known, limit_s, cuda_graph=name == "graph")
    raise NotApplicable(f"there is no method {method!r}")


def prepare_rekindle(
    load: Workload, setting: str, known: dict[str, Any], limit_s: float, cuda_graph: bool
) -> tuple[Any, dict[str, Any]]:
    import rekindle

    peer, share = (setting, 1.0) if setting in ("own", "blocks") else ("eager", float(setting))
    budget: float | int
    if "peak_bytes" in known.get(peer, {}):
        budget = int(share * known[peer]["peak_bytes"])
    elif peer == "eager" and next(load.model.parameters()).device.type == "cpu":
        budget = share  # of the keep-all peak: a CPU's allocator keeps no count
    else:
        raise NotApplicable(f"there is no result of {peer!r} to match")
    say = {"profile": "measure", "hold_outputs": not load.loss_inside, "cuda_graph": cuda_graph}
    call = {"args": load.args, "kwargs": load.kwargs}
    profile_s = 0.0
    device = str(next(load.model.parameters()).device)
    if not known["profiled"]:  # the measured ops are kept on disk: planning measures none then
        with alone(device):
            start = time.perf_counter()
            rekindle.rematerialize(load.model, **call, budget=1.0, solver="keep-all", **say)
            profile_s = time.perf_counter() - start
            known["profiled"]["s"] = profile_s
    with beside_others(device):
        start = time.perf_counter()
        managed = rekindle.rematerialize(
            load.model, **call, budget=budget, time_limit_s=limit_s, **say
        )
        plan_s = time.perf_counter() - start + profile_s
    plan = managed.plan
    return managed, {
        "plan_s": plan_s,
        "budget_bytes": plan.budget_bytes,
        "predicted_peak_bytes": plan.peak_bytes,
        "predicted_overhead": plan.overhead,
        "predicted_ms": plan.predict().step_ns / 1e6,
    }


def step(model: Any, load: Workload) -> torch.Tensor:
    for parameter in load.model.parameters():
        parameter.grad = None
    loss = load.loss(model(*load.args, **load.kwargs))
    loss.backward()
    return loss.detach()


def gradients(load: Workload) -> list[torch.Tensor]:
    return [p.grad.detach().clone() for p in load.model.parameters() if p.grad is not None]


def distance(a: list[torch.Tensor], b: list[torch.Tensor]) -> float:
    """Relative difference of two sets of gradients, over all of them together."""
    top = sum(float((x - y).abs().double().square().sum()) for x, y in zip(a, b, strict=True))
    bottom = sum(float(x.abs().double().square().sum()) for x in a)
    return (top / bottom) ** 0.5 if bottom else 0.0


def _reserved(load: Workload) -> int:
    for parameter in load.model.parameters():
        parameter.grad = None
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def measure(
    run: Callable[[], Any], load: Workload, device: str, repeats: int, reserved: int | None
) -> dict[str, Any]:
    """`reserved`: for a recorded step, what was reserved before it was recorded."""
    cuda = device.startswith("cuda")
    for _ in range(3):
        run()
    for parameter in load.model.parameters():
        parameter.grad = None
    gc.collect()
    result: dict[str, Any] = {}
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        base = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        torch.cuda.synchronize()
        result["peak_bytes"] = torch.cuda.max_memory_allocated() - base
        result["reserved_bytes"] = torch.cuda.max_memory_reserved()
        if reserved is not None:
            result["peak_bytes"] += _reserved(load) - reserved
    return result | timed(run, device, repeats)


def timed(run: Callable[[], Any], device: str, repeats: int) -> dict[str, Any]:
    """Steps that follow each other as in training: the host does not wait at the end of each."""
    times = []
    if device.startswith("cuda"):
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
        for mark in marks:  # the first step only fills the queue
            run()
            mark.record()
        torch.cuda.synchronize()
        times = [a.elapsed_time(b) for a, b in itertools.pairwise(marks)]
    else:
        for _ in range(repeats):
            start = time.perf_counter()
            run()
            times.append((time.perf_counter() - start) * 1e3)
    return {"ms": statistics.median(times), "ms_all": [round(t, 3) for t in times]}


def built(name: str, args: argparse.Namespace) -> Workload:
    torch.manual_seed(0)
    with beside_others(args.device):
        return MODELS[name](args.device, args.small)


def run_case(
    load: Workload, method: str, args: argparse.Namespace, known: dict[str, Any]
) -> dict[str, Any]:
    state = copy.deepcopy(load.model.state_dict())

    def seeded(model: Any) -> list[torch.Tensor]:
        load.model.load_state_dict(state)
        torch.manual_seed(1)
        step(model, load)
        return gradients(load)

    result: dict[str, Any] = {}
    ours = method.startswith(("rekindle", "graph"))
    graph = method.startswith("graph")
    reserved = _reserved(load) if graph and args.device.startswith("cuda") else None
    start = time.perf_counter()
    model, notes = prepare(load, method, known, args.plan_limit)
    result |= notes
    if method.startswith("inductor"):
        with beside_others(args.device):
            step(model, load)  # compiles on the host, what Inductor's caches do not have
            torch.cuda.empty_cache()
    with alone(args.device):
        if ours or method == "eager":
            plain = seeded(load.model)
            result["eager_to_itself"] = max(
                distance(plain, seeded(load.model)) for _ in range(NUM_AGAIN)
            )
        if ours:
            for _ in range(2 if graph else 0):  # it runs, is recorded, and then replayed
                seeded(model)
            result["gradient_error"] = distance(plain, seeded(model))
        plain = []
        step(model, load)
        result["first_step_s"] = time.perf_counter() - start
        result |= measure(lambda: step(model, load), load, args.device, args.repeats, reserved)
        if ours:
            beside = timed(lambda: step(load.model, load), args.device, args.repeats)
            result["eager_ms"] = beside["ms"]
    return result
