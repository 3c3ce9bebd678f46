"""The largest batch, sequence and picture that train in 24, 40 and 80 GiB, by method.

    python benchmarks/gpu/bigger.py --deadline 200                # every missing or stale case
    python benchmarks/gpu/bigger.py --cases unet,llama-1b:24+40   # a case with cards of its own
    python benchmarks/gpu/bigger.py --cases unet --jobs 1         # alone: with the time of a step
    python benchmarks/gpu/bigger.py --device cpu --small --results /tmp/try   # try the script

A size fits when two whole steps (forward, backward, AdamW with its state resident) run in a process
whose allocator is held to the card by `torch.cuda.set_per_process_memory_fraction`. Methods: eager;
own (the model's own block switch, or torch.utils.checkpoint around each block where it has none);
rekindle (`device_budget=` the card, `optimizer=` the one that steps). For eager and own two small
sizes are measured, for Rekindle the smallest peak is asked for at two sizes, which takes no memory;
the line through them says where to try (`largest.py`).

One process per case and method works through its cards. Several run at the same time as long as
their cards and what waits beside them stay below `--memory`. A result is stored as
bigger/CASE.METHOD.CARD.json and is stale when this script, the models, torch or the device changed.
Without a GPU the peak that a step had by the profiler's account is held against the limit.
"""

import argparse
import contextlib
import dataclasses
import gc
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
from largest import Found, largest, predicted  # noqa: E402
from methods import beside_others, wrap_blocks  # noqa: E402
from models import MODELS, Workload  # noqa: E402
from stamps import is_stale, stamp  # noqa: E402

GIB = 2**30
METHODS = ("rekindle", "own", "eager")  # what takes longest goes first
ANSWER = "ANSWER "  # before what a worker says: libraries print too


# ---- cases


@dataclasses.dataclass(frozen=True)
class Case:
    """`resized` gives the workload other inputs of that size."""

    model: str
    title: str
    resized: Callable[[Workload, int, bool], Workload]
    grain: int
    probes: tuple[int, int]  # sizes of which eager fits everywhere,
    more: int  # and times this, the methods that save memory
    small_grain: int = 1
    power: int = 1  # memory is a line in size**power
    distinct: bool = False  # no layer repeats: measuring every op takes as long as many steps


def _text(load: Workload, batch: int, length: int) -> Workload:
    model = load.model
    device = next(model.parameters()).device
    ids = torch.randint(0, model.config.vocab_size, (batch, length), device=device)
    return dataclasses.replace(load, kwargs={"input_ids": ids, "labels": ids})


def _pictures(load: Workload, size: int, small: bool) -> Workload:
    given = load.args[0]
    images = torch.randn(size, *given.shape[1:], device=given.device)
    targets = torch.randint(0, 1000, (size,), device=given.device)
    return dataclasses.replace(load, args=(images,), loss=lambda out: F.cross_entropy(out, targets))


def _sides(load: Workload, size: int, small: bool) -> Workload:
    # Not one picture: a convolution splits what 32 bits cannot count by batch.
    batch, device = (2 if small else 16), load.args[0].device
    x = torch.randn(batch, 3, size, size, device=device)
    y = torch.rand(batch, 1, size, size, device=device)
    return dataclasses.replace(
        load, args=(x,), loss=lambda out: F.binary_cross_entropy_with_logits(out, y)
    )


CASES = {
    "gpt2-medium": Case(
        "gpt2-medium-bf16-sdpa", "GPT-2 medium, bf16, 1024 tokens: batch",
        lambda load, n, small: _text(load, n, 32 if small else 1024), 1, (4, 8), 2,
    ),
    "llama-1b": Case(
        "llama-1b-1x16384", "Llama 1B, bf16, one sequence: tokens",
        lambda load, n, small: _text(load, 1, n), 1024, (2048, 4096), 4, small_grain=16,
    ),
    "vit-large": Case(
        "vit-large", "ViT-L, fp32 (tf32): batch", _pictures, 1, (8, 16), 16,
    ),
    "unet": Case(
        "unet", "UNet, fp32 (tf32), batch 16: pixels a side", _sides, 32, (192, 256), 2,
        small_grain=4, power=2, distinct=True,
    ),
}  # fmt: skip


# ---- one case and method, in a process of its own


class Bench:
    """A model with its optimizer, and whether steps of a given size fit into a card."""

    def __init__(self, case: Case, method: str, args: argparse.Namespace) -> None:
        torch.manual_seed(0)
        self.case, self.method, self.args = case, method, args
        self.cuda = args.device.startswith("cuda")
        self.grain = case.small_grain if args.small else case.grain
        self.load = MODELS[case.model](args.device, args.small)
        if method == "own":
            if self.load.enable_own is not None:
                self.load.enable_own(self.load.model)
            else:
                wrap_blocks(self.load, selective=False)
        self.optimizer = torch.optim.AdamW(self.load.model.parameters(), fused=True)
        self.points: list[tuple[int, float]] = []  # size, bytes on the device
        self.fitted = 0
        # What saves memory is probed at larger sizes: at small ones gradients make the peak.
        more = 1 if method == "eager" else case.more
        sizes = [n * more // case.grain * self.grain for n in case.probes]
        if method == "rekindle":
            self._step(self.load.model, self._at(self.grain))  # makes the optimizer's state
            for size in sizes:
                self._smallest(size)
        else:
            for size in sizes:
                self._run(self.load.model, self._at(size), None)
                self.points.append((size, self.peak_bytes))
                self.clear()
        self.clear()

    def _at(self, size: int) -> Workload:
        return self.case.resized(self.load, size, self.args.small)

    def clear(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()

    def _step(self, model: Any, load: Workload) -> None:
        load.loss(model(*load.args, **load.kwargs)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def resident_bytes(self, load: Workload) -> int:
        from rekindle.predict import residents_of

        inputs = (load.args, load.kwargs)
        return residents_of(self.load.model, inputs, self.optimizer).total_bytes

    def _run(self, model: Any, load: Workload, card_bytes: int | None) -> None:
        """Two steps; leaves the peak and the seconds of the second."""

        def steps() -> None:
            for _ in range(2):
                begin = time.perf_counter()
                self._step(model, load)
                if self.cuda:
                    torch.cuda.synchronize()
                self.step_s = time.perf_counter() - begin

        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
            steps()
            self.peak_bytes = torch.cuda.max_memory_allocated()
            self.reserved_bytes = torch.cuda.max_memory_reserved()
            return
        from rekindle.profile.cpu_allocator import allocator_deltas, peak_of

        self.peak_bytes = self.resident_bytes(load) + peak_of(allocator_deltas(steps))
        self.reserved_bytes = self.peak_bytes
        if card_bytes is not None and self.peak_bytes > card_bytes:
            raise torch.OutOfMemoryError(f"{self.peak_bytes:,} bytes")

    def _smallest(self, size: int) -> None:
        """What Rekindle needs at least, found without running anything."""
        import rekindle

        load = self._at(size)
        try:
            rekindle.plan(
                load.model, load.args, load.kwargs, budget="1B", profile="estimate",
                time_limit_s=self.args.plan_limit, hold_outputs=not load.loss_inside,
            )  # fmt: skip
        except rekindle.BudgetInfeasible as error:
            self._note_smallest(size, load, error.smallest_peak_bytes)

    def _is_hopeless(self, size: int, card_bytes: int) -> bool:
        """Nothing is measured where even the smallest peak is too large."""
        self._smallest(size)
        room = (1 - self.args.headroom) * card_bytes
        return any(n == size and needed > room for n, needed in self.points)

    def _note_smallest(self, size: int, load: Workload, peak: int | None) -> None:
        if peak is not None:
            self.points.append((size, peak + self.resident_bytes(load)))

    def _managed(self, load: Workload, card_bytes: int, facts: dict[str, Any]) -> Any:
        import rekindle

        begin = time.perf_counter()
        managed = rekindle.rematerialize(
            load.model, load.args, load.kwargs, device_budget=card_bytes,
            optimizer=self.optimizer, headroom=self.args.headroom,
            time_limit_s=self.args.plan_limit, hold_outputs=not load.loss_inside,
            on_miss="raise",
        )  # fmt: skip
        facts |= {
            "plan_s": round(time.perf_counter() - begin, 2),
            "overhead": managed.plan.overhead,
            "budget_bytes": managed.plan.budget_bytes,
        }
        return managed

    def fits(self, size: int, card_bytes: int) -> dict[str, Any]:
        """One try: `fits`, and what there is to say about it."""
        import rekindle

        begin = time.perf_counter()
        facts: dict[str, Any] = {"size": size, "fits": False}
        load = None
        try:
            load = self._at(size)
            model = load.model
            if self.method == "rekindle":
                if self.case.distinct and self._is_hopeless(size, card_bytes):
                    raise rekindle.BudgetInfeasible("the smallest peak found, by estimate")
                model = self._managed(load, card_bytes, facts)
            self._run(model, load, card_bytes)
            facts |= {
                "fits": True,
                "peak_bytes": self.peak_bytes,
                "reserved_bytes": self.reserved_bytes,
                "step_s": self.step_s,
            }
            if self.method != "rekindle":
                self.points.append((size, self.peak_bytes))
        except rekindle.BudgetInfeasible as error:
            facts["why"] = f"BudgetInfeasible: {error}"[:200]
            if load is not None:
                self._note_smallest(size, load, error.smallest_peak_bytes)
        except (RuntimeError, rekindle.RekindleError) as error:  # out of memory, and libraries' own
            facts["why"] = f"{type(error).__name__}: {error}"[:200]
        load = model = None  # before the memory is cleared
        self.clear()
        facts["seconds"] = round(time.perf_counter() - begin, 2)
        return facts

    def _known(self, card_bytes: int) -> int:
        """The largest size that a probe or a smaller card has shown to fit."""
        if self.method == "rekindle":
            return self.fitted
        return max((n for n, needed in self.points if needed <= 0.97 * card_bytes), default=0)

    def search(self, card: float, stop: float) -> dict[str, Any]:
        card_bytes = int(card * GIB)
        limit = 0.99 * card_bytes  # blocks that do not fit together
        if self.method == "rekindle":
            limit = (1 - self.args.headroom) * card_bytes - 0.005 * card_bytes
        tries: list[dict[str, Any]] = []
        known = self._known(card_bytes)

        def fits(size: int) -> bool:
            with beside_others(self.args.device):
                tries.append(self.fits(size, card_bytes))
            said = f"{self.case.model} {self.method} {card:g}: {json.dumps(tries[-1])}"
            print(said, file=sys.stderr, flush=True)
            answer(so_far(tries, known), final=False)
            return bool(tries[-1]["fits"])

        found = largest(
            fits,
            lambda: predicted(
                self.points, limit, self.grain,
                power=self.case.power, exact=self.method != "rekindle",
            ),
            grain=self.grain, tolerance=self.args.tolerance, max_tries=self.args.max_tries,
            known=known, may_go_on=lambda: time.monotonic() < stop,
        )  # fmt: skip
        self.fitted = max(self.fitted, found.size)
        return dataclasses.asdict(found) | {"tries": tries}


def so_far(tries: list[dict[str, Any]], known: int) -> dict[str, Any]:
    """A search that may yet be cut off, as a result."""
    size = max([known, *(t["size"] for t in tries if t["fits"])])
    fails = min((t["size"] for t in tries if not t["fits"]), default=None)
    found = Found(size, fails, len(tries), closed=False)
    return dataclasses.asdict(found) | {"tries": tries}


def answer(record: dict[str, Any], *, final: bool) -> None:
    print(ANSWER + json.dumps(record | {"final": final}), flush=True)


def hold_to(card: float, device: str) -> None:
    if device.startswith("cuda"):
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(card * GIB / total)


def work(args: argparse.Namespace) -> None:
    """Cards come in line by line, with the seconds after which no new try begins; answers go out
    line by line."""
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    bench = None
    for line in sys.stdin:
        try:
            card, limit_s = map(float, line.split())
            stop = time.monotonic() + limit_s
            hold_to(card, args.device)
            if bench is None:
                with beside_others(args.device):
                    bench = Bench(CASES[args.cases], args.methods, args)
            record = bench.search(card, stop)
        except Exception as error:
            record = {"error": f"{type(error).__name__}: {error}"[:500]}
        held = torch.cuda.memory_reserved() if args.device.startswith("cuda") else 0
        answer(record | {"held_bytes": held}, final=True)


# ---- all of them


class Room:
    """The GPU's memory in GiB, shared by workers; one that waits for a card keeps what it holds."""

    def __init__(self, total: float, stop: float) -> None:
        self.free, self.stop, self.changed = total, stop, threading.Condition()

    def seconds_left(self) -> float:
        return self.stop - time.monotonic()

    def change(self, held: float, wanted: float) -> float:
        """What is held then: what was wanted, or as before where time ran out."""
        with self.changed:
            if self.changed.wait_for(
                lambda: self.free + held >= wanted, max(0.0, self.seconds_left())
            ):
                self.free += held - wanted
                held = wanted
            self.changed.notify_all()
        return held


def stamp_of(args: argparse.Namespace) -> str:
    files = ("models.py", "largest.py", "bigger.py")
    return stamp(files, args.device, args.small, ours=False)


def run_worker(case: str, method: str, args: argparse.Namespace, room: Room) -> None:
    stamped = stamp_of(args)
    name, _, own_cards = case.partition(":")
    cards = [float(c) for c in (own_cards or args.cards).replace("+", ",").split(",")]
    paths = {c: args.results / f"{name}.{method}.{c:g}.json" for c in sorted(cards)}
    todo = [c for c, path in paths.items() if c <= args.memory and is_stale(path, stamped)]
    held = room.change(0.0, todo[0]) if todo else 0.0
    if not held:
        return
    command = [
        sys.executable, __file__, "--worker", "--cases", name, "--methods", method,
        "--device", args.device, "--plan-limit", str(args.plan_limit),
        "--headroom", str(args.headroom), "--tolerance", str(args.tolerance),
        "--max-tries", str(args.max_tries), *(["--small"] if args.small else []),
    ]  # fmt: skip
    environment = os.environ | {"PYTORCH_ALLOC_CONF": args.allocator}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as worker:
        for card in todo:
            held = room.change(held, card)
            left = min(args.timeout, room.seconds_left())
            said = ask(worker, card, left) if held >= card and left > 0 else None
            if said is None:
                print(f"{name} {method} {card:g}: no time left", flush=True)
                break
            more = {"case": name, "title": CASES[name].title, "method": method, "card": card}
            more |= {"stamp": stamped, "alone": args.jobs == 1, "headroom": args.headroom}
            paths[card].write_text(json.dumps(more | said, indent=1) + "\n")
            print(f"{name} {method} {card:g}: {brief(said)}", flush=True)
            if "error" in said or not said["final"]:
                break
            held = room.change(held, min(held, said["held_bytes"] / GIB + 1))
        worker.kill()
    room.change(held, 0.0)  # once the process is gone


def ask(worker: subprocess.Popen[str], card: float, limit_s: float) -> dict[str, Any] | None:
    """The last that the worker says about the card; None: nothing."""
    assert worker.stdin is not None
    assert worker.stdout is not None
    said: dict[str, Any] | None = None
    clock = threading.Timer(limit_s, worker.kill)
    clock.start()
    try:
        worker.stdin.write(f"{card} {0.8 * limit_s}\n")
        worker.stdin.flush()
        for line in worker.stdout:
            if line.startswith(ANSWER):
                said = json.loads(line.removeprefix(ANSWER))
                if said["final"]:
                    break
    except json.JSONDecodeError:  # it was stopped, in the middle of a line
        pass
    except BrokenPipeError:  # it was stopped before
        with contextlib.suppress(BrokenPipeError):
            worker.stdin.close()  # else what was not written is tried again when the pipe is closed
    finally:
        clock.cancel()
    return said


def brief(said: dict[str, Any]) -> str:
    if "error" in said:
        return str(said["error"])
    seconds = sum(t["seconds"] for t in said["tries"])
    ends = f"{said['fails']} does not" if said["fails"] else "the end was not reached"
    return f"{said['size']} fits, {ends}; {said['num_tries']} tries in {seconds:.1f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--cards", help="GiB, by default 24,40,80")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--results", type=Path, default=HERE / "bigger")
    parser.add_argument("--jobs", type=int, default=4, help="processes at the same time")
    parser.add_argument("--memory", type=float, default=130.0, help="GiB for all of them")
    parser.add_argument("--deadline", type=float, default=600.0, help="seconds in all")
    parser.add_argument("--timeout", type=float, default=90.0, help="seconds for one card")
    parser.add_argument("--plan-limit", type=float, default=4.0, help="seconds for the solver")
    parser.add_argument("--headroom", type=float, default=0.02, help="Rekindle's, of the card")
    parser.add_argument("--tolerance", type=float, default=0.02, help="of the size")
    parser.add_argument("--max-tries", type=int, default=6, help="for one card")
    parser.add_argument("--allocator", default="expandable_segments:True")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.cards = args.cards or ("0.01,0.02" if args.small else "24,40,80")
    if args.worker:
        work(args)
        return
    args.results.mkdir(parents=True, exist_ok=True)
    room = Room(args.memory, time.monotonic() + args.deadline)
    with ThreadPoolExecutor(args.jobs) as pool:
        runs = [
            pool.submit(run_worker, case, method, args, room)
            for method in args.methods.split(",")
            for case in args.cases.split(",")
        ]
        for run in runs:
            run.result()


if __name__ == "__main__":
    main()
