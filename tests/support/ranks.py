"""What two processes do in the tests of several ranks. Each scenario returns plain data, which the
test process judges; one pair of processes runs them all, since starting one takes seconds."""

import contextlib
import copy
import hashlib
import json
import os
import traceback
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from support.meter import LiveMeter, resident_of
from support.schedules import SCHEDULES
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import rekindle
from rekindle.core import simulate
from rekindle.integrate import distributed
from rekindle.integrate.adapter_options import settings_of
from rekindle.runtime.runner import Runner

WIDTH, BATCH, STEPS = 32, 64, 20


def blocks(num: int = 6) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1)) for _ in range(num)]
    )


def batch(rank: int, step: int, size: int = BATCH) -> Tensor:
    generator = torch.Generator().manual_seed(100 * rank + step)
    return torch.randn(size, WIDTH, generator=generator)


def digest(tensor: Tensor) -> str:
    """Equal for tensors that are equal to the bit."""
    return hashlib.sha256(tensor.detach().contiguous().numpy().tobytes()).hexdigest()


def train(call: nn.Module, parameters: list[Tensor], rank: int) -> dict[str, Any]:
    """Losses, the gradients of the last step and the parameters after it, as exact numbers."""
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    losses = []
    torch.manual_seed(50 + rank)
    for step in range(STEPS):
        optimizer.zero_grad()
        x = batch(rank, step)
        loss = (call(x) - x).square().mean()
        loss.backward()
        losses.append(loss.item())
        if step < STEPS - 1:
            optimizer.step()
    return {
        "losses": losses,
        "gradients": [None if p.grad is None else digest(p.grad) for p in parameters],
        "keys": list(call.state_dict()),
    }


def live_peak(call: nn.Module, rank: int) -> int:
    """The most bytes that one step has alive, beside what is resident."""
    x = batch(rank, 0)
    call.zero_grad()
    meter = LiveMeter(resident_of(call, x))
    with meter:
        (call(x) - x).square().mean().backward()
    return meter.peak


def planned(model: nn.Module, rank: int, **options: Any) -> nn.Module:
    given = {"budget": 0.8, "profile": "estimate", "time_limit_s": 1, "on_miss": "raise"}
    return distributed.rematerialize(model, (batch(rank, 0),), **{**given, **options})


def facts(managed: nn.Module) -> dict[str, Any]:
    plan = managed.plan
    trace = simulate(plan.problem, plan.schedule)
    return {
        "schedule": list(plan.schedule.ops),
        "budget": plan.budget_bytes,
        "peak": plan.peak_bytes,
        "keep_all_peak": plan.keep_all_peak_bytes,
        "cost": plan.cost_ns,
        "again": trace.num_recomputed,
    }


# ---- DistributedDataParallel


def reduce_and_note(
    events: list[str], bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    events.append("bucket")
    work = dist.all_reduce(bucket.buffer().div_(2), async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


def ddp(rank: int) -> dict[str, Any]:
    """A managed module inside; small buckets, and the order in which they leave."""
    results: dict[str, Any] = {}
    for name in ("plain", "managed"):
        model = blocks()
        events: list[str] = []
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient, events=events: events.append("gradient"))
        inner = model
        if name == "managed":
            inner = planned(model, rank)
            results["plan"] = facts(inner)
        wrapped = DistributedDataParallel(inner, bucket_cap_mb=0.006)

        wrapped.register_comm_hook(events, reduce_and_note)
        results[name] = train(wrapped, list(model.parameters()), rank)
        results[f"{name} events"] = events[-(len(events) // STEPS) :]
        results[f"{name} peak"] = live_peak(wrapped, rank)
        saved = {k: digest(v) for k, v in wrapped.state_dict().items()}
        fresh = DistributedDataParallel(planned(blocks(), rank) if name == "plain" else blocks())
        fresh.load_state_dict(wrapped.state_dict())  # saved by one, loaded by the other
        assert {k: digest(v) for k, v in fresh.state_dict().items()} == saved
        wrapped.zero_grad()
        with wrapped.no_sync():
            wrapped(batch(rank, 7)).square().mean().backward()
        wrapped(batch(rank, 8)).square().mean().backward()
        results[f"{name} accumulated"] = [digest(p.grad) for p in model.parameters()]
    return results


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = blocks(3), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


def ddp_unused(rank: int) -> dict[str, Any]:
    results = {}
    for name in ("plain", "managed"):
        model = Unused()
        inner = planned(model, rank, budget=0.9) if name == "managed" else model
        wrapped = DistributedDataParallel(inner, find_unused_parameters=True)
        results[name] = train(wrapped, list(model.parameters()), rank)
    return results


def ddp_first_sight(rank: int) -> dict[str, Any]:
    """As the trainers' callbacks do: managed without a sample, costs measured by one rank."""
    options = {"budget": 0.8, "time_limit_s": 1}
    settings = settings_of(options, "the test", share=True)
    model = blocks()
    settings.manage(model)
    wrapped = DistributedDataParallel(model)
    managed = train(wrapped, list(model.parameters()), rank)
    plain = blocks()
    expected = train(DistributedDataParallel(plain), list(plain.parameters()), rank)
    uneven = settings.manage(blocks(3))
    uneven(batch(rank, 0, size=32 + rank)).sum().backward()  # each rank another shape
    return {
        "managed": managed,
        "plain": expected,
        "plan": facts(model),
        "uneven": facts(uneven),
    }


# ---- one plan for all


def outcome(act: Callable[[], Any]) -> str:
    try:
        act()
    except rekindle.RekindleError as error:
        return f"{type(error).__name__}: {error}"
    return "done"


def one_plan(rank: int) -> dict[str, Any]:
    keep_all = rekindle.plan(
        blocks(), (batch(rank, 0),), budget=1.0, profile="estimate"
    ).keep_all_peak_bytes
    mine = keep_all if rank == 0 else int(0.8 * keep_all)
    return {
        "keep_all": keep_all,
        "smallest wins": facts(planned(blocks(), rank, budget=mine)),
        "device budgets": facts(
            planned(blocks(), rank, budget=None, device_budget=f"{180 - 10 * rank}KB", headroom=0)
        ),
        "measured": facts(planned(blocks(), rank, profile="measure", cache=False)),
        "out of reach": outcome(lambda: planned(blocks(), rank, budget=10**6 if rank else "100B")),
        "other model": outcome(lambda: planned(blocks(5 + rank), rank)),
        "bad budget": outcome(lambda: planned(blocks(), rank, budget="eight" if rank else 0.9)),
        "two kinds": outcome(lambda: planned(blocks(), rank, budget=10**6 if rank else 0.9)),
        "bad wish": outcome(lambda: planned(blocks(), rank, save="nowhere")),
        "afterwards": facts(planned(blocks(), rank)),
    }


# ---- fully_shard


def sharded(rank: int) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2,))
    results: dict[str, Any] = {}
    for name in ("plain", "managed", "first sight"):
        model = blocks(4)
        for block in model:
            if name != "plain":
                x = batch(rank, 0).requires_grad_()
                rekindle.rematerialize(
                    block, schedule=SCHEDULES["thrice"], profile="estimate", inplace=True,
                    on_miss="raise", **({"args": (x,)} if name == "managed" else {}),
                )  # fmt: skip
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        torch.manual_seed(50 + rank)
        for step in range(STEPS):
            optimizer.zero_grad()
            x = batch(rank, step).requires_grad_()
            loss = (model(x) - x).square().mean()
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
        results[name] = {
            "losses": losses,
            "parameters": [digest(p.to_local()) for p in model.parameters()],
            "keys": list(model.state_dict()),
        }
        if name != "plain":
            results[f"{name} plans"] = [len(block.plans) for block in model]
    return results


# ---- pipeline stages


@contextlib.contextmanager
def counted_runs() -> Iterator[list[Runner]]:
    """The runner of each call that a plan runs."""
    runs: list[Runner] = []
    run = Runner.__call__

    def counted(self: Runner, *args: Any, **kwargs: Any) -> Any:
        runs.append(self)
        return run(self, *args, **kwargs)

    with mock.patch.object(Runner, "__call__", counted):
        yield runs


def pipeline(rank: int) -> dict[str, Any]:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    def loss_fn(out: Tensor, target: Tensor) -> Tensor:
        return (out - target).square().mean()

    results: dict[str, Any] = {}
    x = batch(9, 0)
    for kind in (ScheduleGPipe, Schedule1F1B):
        for name in ("plain", "managed"):
            stage_module = blocks(6)[3 * rank : 3 * rank + 3]
            original = stage_module
            if name == "managed":
                sample = x[: BATCH // 4].clone().requires_grad_(rank > 0)
                stage_module = rekindle.rematerialize(
                    stage_module, (sample,), budget=(0.9, 0.95)[rank], time_limit_s=1,
                    profile="estimate", on_miss="eager",
                )  # fmt: skip
            stage = PipelineStage(stage_module, rank, 2, torch.device("cpu"))
            schedule = kind(stage, n_microbatches=4, loss_fn=loss_fn)
            torch.manual_seed(50 + rank)
            losses: list[Tensor] = []
            with warnings.catch_warnings(), counted_runs() as runs:
                warnings.simplefilter("ignore")
                for _ in range(2):
                    if rank == 0:
                        schedule.step(x)
                    else:
                        schedule.step(target=x, losses=losses)
            results[f"{kind.__name__} {name}"] = {
                "losses": [one.item() for one in losses],
                "gradients": [digest(p.grad) for p in original.parameters()],
            }
            if name == "managed":
                results[f"{kind.__name__} plan"] = facts(stage_module)
                # The stage's look at shapes, without gradients, is eager; the rest is planned.
                results[f"{kind.__name__} planned calls"] = len(runs)
    return results


SCENARIOS = {
    "ddp": ddp,
    "ddp_unused": ddp_unused,
    "ddp_first_sight": ddp_first_sight,
    "one_plan": one_plan,
    "sharded": sharded,
    "pipeline": pipeline,
}


def work(rank: int, folder: str, names: list[str]) -> None:
    """One rank: all scenarios one after the other, each result in a file."""
    torch.set_num_threads(1)
    os.environ["REKINDLE_CACHE_DIR"] = str(Path(folder) / f"cache {rank}")
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meeting",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=60),
    )
    for name in names:
        try:
            result: dict[str, Any] = copy.deepcopy(SCENARIOS[name](rank))
        except BaseException:
            result = {"failed": traceback.format_exc()}
        (Path(folder) / f"{name} {rank}.json").write_text(json.dumps(result))
        if "failed" in result:
            break
    dist.destroy_process_group()
