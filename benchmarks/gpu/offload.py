"""Moving values to host memory, against recomputing alone and against other offloaders.

    python benchmarks/gpu/offload.py --deadline 170                 # what has no record yet
    python benchmarks/gpu/offload.py --models t5-base --again       # these once more
    python benchmarks/gpu/offload.py --table
    python benchmarks/gpu/offload.py --check                        # exact under load, 100 steps
    python benchmarks/gpu/offload.py --device cpu --small --records try.jsonl  # try the script

Methods: eager; own (the model's own block switch, whose peak is the budget of Rekindle's cases);
keep-all (Rekindle with all of the peak); rekindle (recomputation alone); offload (with
offload="auto"); save_on_cpu (`torch.autograd.graph.save_on_cpu(pin_memory=True)`: every saved
tensor); streamed (every saved tensor of 1 KiB or more, on a side stream with a few kept back, as
torchtune and TRL publish it); by-hand (the same with the earliest tensors first, no more bytes than
bring the peak to the switch's, fetched ahead in the backward).

One process per case. Records are lines of `--records`, one per case; a case that has one without an
error is not run again, but by `--again`. After `--deadline` seconds nothing is begun, and what runs
is ended; the same command goes on another time. Times are medians of CUDA events between steps that
follow each other.
"""

import argparse
import contextlib
import json
import random
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
from methods import distance, gradients, measure, step  # noqa: E402
from models import MODELS, Workload  # noqa: E402

NAMES = (*("gpt2-medium-bf16-sdpa", "t5-base", "llama-1b-4x4096", "vit-large", "llama-1b-1x16384"),)
METHODS = (
    *("own", "rekindle", "offload", "keep-all", "eager", "by-hand", "streamed", "save_on_cpu"),
)
GIB = 2**30
LEAST_BYTES = 1024  # of a saved tensor that is moved
KEPT_BACK = 5  # tensors whose transfer may still run
AHEAD = 3  # tensors that are fetched before they are asked for
Record = dict[str, Any]


# ---- other offloaders


class Streamed(torch.autograd.graph.saved_tensors_hooks):
    """Saved tensors on a side stream each way. With `limit_bytes` only the first of them, which are
    needed last, fetched ahead in the backward."""

    def __init__(self, parameters: set[int], limit_bytes: int | None = None) -> None:
        self.parameters, self.limit_bytes = parameters, limit_bytes
        self.num_bytes = 0
        self.out, self.back = torch.cuda.Stream(), torch.cuda.Stream()
        self.on_way: list[tuple[torch.Tensor, torch.cuda.Event]] = []
        self.moved: list[Any] = []  # host copies in the order of the forward
        self.fetched: dict[int, tuple[torch.Tensor, torch.cuda.Event]] = {}
        super().__init__(self._pack, self._unpack)

    def _pack(self, tensor: torch.Tensor) -> Any:
        size = tensor.numel() * tensor.element_size()
        storage = tensor.untyped_storage()
        own = storage.nbytes() == size and tensor.is_contiguous()
        if size < LEAST_BYTES or not tensor.is_cuda or not own:
            return tensor
        if storage.data_ptr() in self.parameters:
            return tensor
        if self.limit_bytes is not None and self.num_bytes + size > self.limit_bytes:
            return tensor
        self.num_bytes += size
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self.out.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.out):
            host.copy_(tensor, non_blocking=True)
            done = self.out.record_event()
        self.on_way.append((tensor, done))
        while len(self.on_way) > KEPT_BACK:
            torch.cuda.current_stream().wait_event(self.on_way.pop(0)[1])
        self.moved.append(host)
        return (self, len(self.moved) - 1)

    def _unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        _, index = packed
        self.on_way.clear()
        ahead = AHEAD if self.limit_bytes is not None else 0
        for i in range(index, max(-1, index - ahead - 1), -1):
            if i not in self.fetched:
                self._fetch(i)
        tensor, done = self.fetched[index]
        torch.cuda.current_stream().wait_event(done)
        return tensor

    def _fetch(self, index: int) -> None:
        host = self.moved[index]
        there = torch.empty(host.shape, dtype=host.dtype, device="cuda")
        self.back.wait_stream(torch.cuda.current_stream())
        self.back.wait_stream(self.out)
        with torch.cuda.stream(self.back):
            there.copy_(host, non_blocking=True)
            self.fetched[index] = there, self.back.record_event()
        # What has been asked for, and lies behind, is not asked for again.
        for i in [i for i in self.fetched if i > index + AHEAD + 1]:
            del self.fetched[i]


def hooked(load: Workload, method: str, record: Record) -> Callable[[], Any]:
    """A step with hooks on saved tensors."""
    owned = {p.untyped_storage().data_ptr() for p in load.model.parameters()}
    limit: int | None = None
    if method == "by-hand":
        limit = max(0, record["eager_peak_bytes"] - record["own_peak_bytes"])

    def run() -> torch.Tensor:
        for parameter in load.model.parameters():
            parameter.grad = None
        around: Any
        if method == "save_on_cpu":
            around = torch.autograd.graph.save_on_cpu(pin_memory=True)
        else:
            around = Streamed(owned, limit)
        with around:
            loss = load.loss(load.model(*load.args, **load.kwargs))
        loss.backward()
        return loss.detach()

    return run


# ---- one case, in a process of its own


def managed(load: Workload, method: str, record: Record, args: argparse.Namespace) -> Any:
    import rekindle

    budget: float | int = 1.0
    if method != "keep-all":
        # Of what was measured: Rekindle's budget is the switch's activation peak.
        budget = record.get("own_peak_bytes") or 0.5
    begun = time.perf_counter()
    model = rekindle.rematerialize(
        load.model,
        load.args,
        load.kwargs,
        budget=budget,
        profile="measure",
        hold_outputs=not load.loss_inside,
        offload=args.offload if method == "offload" else False,
        time_limit_s=args.plan_limit,
    )
    plan = model.plan
    record |= {
        "plan_s": time.perf_counter() - begun,
        "budget_bytes": plan.budget_bytes,
        "predicted_ms": plan.predict().step_ns / 1e6,
        "moved_bytes": plan.moved_bytes,
        "host_bytes": plan.host_peak_bytes,
        "host_rates": str(plan.profile.host),
        "plan": str(plan),
    }
    return model


def run_case(name: str, method: str, known: Record, args: argparse.Namespace) -> Record:
    torch.manual_seed(0)
    load = MODELS[name](args.device, args.small)
    record: Record = {"model": name, "method": method, **known}
    state = {k: v.detach().clone() for k, v in load.model.state_dict().items()}

    def seeded(run: Callable[[], Any]) -> list[torch.Tensor]:
        load.model.load_state_dict(state)
        torch.manual_seed(1)
        run()
        return gradients(load)

    run: Callable[[], Any] = lambda: step(load.model, load)  # noqa: E731 - replaced below
    if method in ("rekindle", "offload", "keep-all"):
        plain = seeded(run)
        record["eager_to_itself"] = distance(plain, seeded(run))
        model = managed(load, method, record, args)
        run = lambda: step(model, load)  # noqa: E731
        record["gradient_error"] = distance(plain, seeded(run))
        del plain
    elif method == "own":
        assert load.enable_own is not None, "the model has no switch of its own"
        load.enable_own(load.model)
    elif method != "eager":
        run = hooked(load, method, record)
    return record | measure(run, load, args.device, args.repeats, None)


# ---- exact under load


@contextlib.contextmanager
def busy_stream(device: str) -> Iterator[Callable[[], None]]:
    """Yields what queues work on a second stream, beside the step."""
    stream = torch.cuda.Stream(device)
    noise = torch.randn(4096, 4096, device=device)

    def more() -> None:
        with torch.cuda.stream(stream):
            for _ in range(random.randrange(4)):
                noise.mul_(1.0)
                torch.mm(noise, noise)

    yield more
    torch.cuda.synchronize()


def check(args: argparse.Namespace) -> Record:
    """A step that moves half of what it keeps, 100 times, with another stream busy and the host
    late at random: every gradient equal to eager's, to the bit."""
    from torch import nn

    import rekindle
    from rekindle.core import Problem, Schedule, keep_all, simulate
    from rekindle.solve.transfers.fit import fit
    from rekindle.solve.transfers.gaps import sequence_of

    def moving(problem: Problem) -> Schedule:
        ops = keep_all(problem).ops
        peak = simulate(problem, Schedule(ops)).peak
        for share in (0.5, 0.6, 0.7, 0.8, 0.9):
            found = fit(sequence_of(problem, ops), int(share * peak))
            if found is not None and found.transfers:
                return found
        raise AssertionError("nothing could be moved")

    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.manual_seed(0)
    width, rows = (256, 512) if args.small else (2048, 16384)
    layers = [
        m for _ in range(8) for m in (nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width))
    ]
    model = nn.Sequential(*layers).to(args.device)
    x = torch.randn(rows, width, device=args.device)
    plan = {"schedule": moving, "offload": args.offload, "cache": False}
    new = rekindle.rematerialize(model, (x,), profile="estimate", on_miss="raise", **plan)
    wrong = 0
    around = (
        busy_stream(args.device) if args.device.startswith("cuda") else contextlib.nullcontext()
    )
    source = random.Random(0)
    with around as more:
        for number in range(args.steps):
            x = torch.randn(rows, width, device=args.device)
            expected = torch.autograd.grad(model(x).square().mean(), list(model.parameters()))
            if more is not None:
                more()
            loss = new(x).square().mean()
            time.sleep(source.choice((0.0, 0.0, 0.002)))
            if number % 7 == 3:
                other = new(x).sum()  # a second step while the first is alive
                other.backward()
                del other
                for parameter in model.parameters():
                    parameter.grad = None
            got = torch.autograd.grad(loss, list(model.parameters()))
            wrong += not all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
    record = {"steps": args.steps, "wrong": wrong, "moved_bytes": new.plan.moved_bytes}
    return {"model": "check", "method": "check", **record}


# ---- all cases


def stored(args: argparse.Namespace) -> dict[tuple[str, str], Record]:
    found: dict[tuple[str, str], Record] = {}
    if args.records.exists():
        for line in args.records.read_text("utf-8").splitlines():
            record = json.loads(line)
            found[record["model"], record["method"]] = record
    return found


def store(record: Record, args: argparse.Namespace) -> None:
    with args.records.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


def child(name: str, method: str, args: argparse.Namespace) -> None:
    known = {}
    for other in ("own", "eager"):
        peak = stored(args).get((name, other), {}).get("peak_bytes")
        if peak is not None:
            known[f"{other}_peak_bytes"] = peak
    try:
        record = check(args) if name == "check" else run_case(name, method, known, args)
    except Exception as error:
        lines = traceback.format_exc().splitlines()[-6:]
        record = {
            "model": name,
            "method": method,
            "error": f"{type(error).__name__}: {error}"[:500],
        }
        record["trace"] = lines
    if torch.cuda.is_available():
        record["device"] = torch.cuda.get_device_name()
    store(record | {"torch": torch.__version__}, args)


def run_all(args: argparse.Namespace) -> None:
    begun = time.monotonic()
    cases = [("check", "check")] if args.check else []
    if not args.check:
        cases = [(name, method) for method in args.methods for name in args.models]
    for name, method in cases:
        known = stored(args).get((name, method))
        if known is not None and "error" not in known and not args.again:
            continue
        left = args.deadline - (time.monotonic() - begun)
        if left < 10:
            print("the deadline is near: the same command goes on another time")
            return
        command = [sys.executable, __file__, *sys.argv[1:], "--case", name, method]
        try:
            subprocess.run(command, timeout=left, check=False)
        except subprocess.TimeoutExpired:
            print(f"{name} {method}: ended at the deadline")
            return
        print(line(stored(args).get((name, method), {"model": name, "method": method})), flush=True)


def line(record: Record) -> str:
    if "error" in record:
        return f"{record['model']:24} {record['method']:12} {record['error'][:120]}"
    if record["model"] == "check":
        return f"check: {record.get('wrong')} of {record.get('steps')} steps differ from eager"
    if "ms" not in record:
        return f"{record['model']:24} {record['method']:12} no record"
    text = f"{record['model']:24} {record['method']:12} {record['ms']:9.2f} ms"
    if "peak_bytes" in record:
        text += f" {record['peak_bytes'] / GIB:7.2f} GiB"
    if "predicted_ms" in record:
        text += f"  predicted {record['predicted_ms']:.2f} ms, plan {record['plan_s']:.1f} s"
        text += f", moved {record['moved_bytes'] / GIB:.2f} GiB"
        text += f", gradients {record['gradient_error']:.1e} ({record['eager_to_itself']:.1e})"
    return text


def table(args: argparse.Namespace) -> None:
    records = stored(args)
    for record in records.values():
        print(line(record))
    print("share of the overhead above keep-all that moving removes:")
    for name in args.models:
        rows = {
            m: records.get((name, m), {}).get("ms") for m in ("keep-all", "rekindle", "offload")
        }
        if all(rows.values()):
            most, now = rows["rekindle"] - rows["keep-all"], rows["offload"] - rows["keep-all"]
            share = 100 * (1 - now / most) if most > 0 else 0.0
            print(f"{name:24} {rows} removed {share:.0f} %")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--models", type=lambda text: text.split(","), default=list(NAMES))
    parser.add_argument("--methods", type=lambda text: text.split(","), default=list(METHODS))
    parser.add_argument("--records", type=Path, default=HERE / "offload.jsonl")
    parser.add_argument("--deadline", type=float, default=1e9)
    parser.add_argument("--plan-limit", type=float, default=15.0)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--offload", default="auto")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--case", nargs=2, metavar=("MODEL", "METHOD"))
    args = parser.parse_args()
    if args.case:
        child(*args.case, args)
    elif args.table:
        table(args)
    else:
        run_all(args)


if __name__ == "__main__":
    main()
