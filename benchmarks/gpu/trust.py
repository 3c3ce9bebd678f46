"""Whether budgets are kept and times are as predicted, on models that no test names.

    python benchmarks/gpu/trust.py --jobs 7 --deadline 560       # what has no record yet
    python benchmarks/gpu/trust.py --models opt,clip --again     # these once more
    python benchmarks/gpu/trust.py --table                       # writes TRUST.md
    python benchmarks/gpu/trust.py --device cpu --small --records /tmp/try.jsonl    # try the script

Each model trains with its loss outside, `criterion(managed(x), y).backward()`, under three budgets:
two fractions, and the smallest that is found. A fraction that cannot be met becomes the smallest
(`best_effort=True`), which is noted. Six steps run: the first three are watched and may be planned
again, so the peaks of steps 4 to 6 are held against the budget. Predicted and measured time are of
`rekindle.measure`, forward and backward without the loss. Gradients are compared with eager's.

One process per model, `--jobs N` at once, each on cores of its own; what is timed, profiling
included, runs while nobody else uses the device. Records are lines of `--records`, one per case. A
case that has one without an error is not run again, but by `--again`; the first models are the most
important. After `--deadline` seconds what runs is ended, and the same command goes on another time.
A process that a device-side assert or `--limit` ends leaves a record that says so.
"""

import argparse
import gc
import json
import logging
import random
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
from compare import run_all  # noqa: E402
from methods import alone, beside_others, distance, gradients, step, timed  # noqa: E402
from models import Workload  # noqa: E402
from stamps import stamp  # noqa: E402
from trust_models import ALL, EXPERT_MODELS  # noqa: E402

BUDGETS = ("0.75", "0.5", "min")
OF_EXPERTS = ("0.8", "0.5", "min")  # for the models of mixed experts
NUM_STEPS, NUM_WATCHED = 6, 3
SLOW_MS = 150.0  # steps that are timed less often
Record = dict[str, Any]


# ---- one model, in a process of its own


class Case:
    """A model of the list, and what is measured of it."""

    def __init__(self, name: str, args: argparse.Namespace) -> None:
        self.name, self.args, self.device = name, args, args.device
        self.on_gpu = args.device.startswith("cuda")
        self.load: Workload
        self.eager: Record = {}
        self.gradients: list[torch.Tensor] = []

    def record(self, budget: str, found: Record) -> None:
        at = stamp(("trust.py", "trust_models.py"), self.device, self.args.small, True)
        case = {"model": self.name, "budget": budget, "stamp": at, "jobs": self.args.jobs}
        record = case | self.eager | found
        with self.args.records.open("a") as file:
            file.write(json.dumps(record) + "\n")
        print(line(record), flush=True)

    def run(self, budgets: list[str]) -> None:
        try:
            self._prepare()
        except Exception as error:
            for budget in budgets:
                self.record(budget, said(error))
            return
        for budget in budgets:
            try:
                found = self._under(budget)
            except Exception as error:
                found = said(error)
            self.record(budget, found)
            gc.collect()
            if self.on_gpu:
                torch.cuda.empty_cache()

    def _prepare(self) -> None:
        import rekindle

        torch.manual_seed(0)
        with beside_others(self.device):
            self.load = ALL[self.name](self.device, self.args.small)
        with alone(self.device):
            self.gradients = self._seeded(self.load.model)
            self_distance = distance(self.gradients, self._seeded(self.load.model))
            self.eager = {
                "eager_to_itself": self_distance,
                "eager_peak_bytes": self._peak(self.load.model),
                "eager_ms": self._timed(self.load.model),
            }
        say = {"args": self.load.args, "kwargs": self.load.kwargs}
        start = time.perf_counter()
        # The call is read here, beside others; then all is measured, alone.
        rekindle.plan(self.load.model, **say, budget=1.0, solver="keep-all", profile="estimate")
        self.eager["capture_s"] = time.perf_counter() - start
        with alone(self.device):
            start = time.perf_counter()
            rekindle.plan(self.load.model, **say, budget=1.0, solver="keep-all")
            self.eager["profile_s"] = time.perf_counter() - start

    def _under(self, budget: str) -> Record:
        import rekindle

        heard = _Heard()
        start = time.perf_counter()
        managed = rekindle.rematerialize(
            self.load.model,
            self.load.args,
            self.load.kwargs,
            budget=budget if budget == "min" else float(budget),
            best_effort=True,
            time_limit_s=self.args.time_limit,
        )
        found: Record = {"plan_s": time.perf_counter() - start}
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            with beside_others(self.device):
                peaks = [self._peak(managed) for _ in range(NUM_STEPS)]
        heard.lines += [str(w.message) for w in seen if "rekindle" in str(w.message)]
        with alone(self.device):
            found["gradient_error"] = distance(self.gradients, self._seeded(managed))
            found["ms"] = self._timed(managed)
            num_steps = 3 if found["ms"] > SLOW_MS else 9
            measured = rekindle.measure(
                managed, self.load.args, self.load.kwargs, num_steps=num_steps, num_warmup=1
            )
        heard.stop()
        plan = managed.plan
        predicted = plan.predict()
        return found | {
            "budget_bytes": plan.budget_bytes,
            "keep_all_bytes": plan.keep_all_peak_bytes,
            "peaks": peaks,
            "predicted_bytes": predicted.peak_bytes,
            "overhead": plan.overhead,
            "predicted_ms": predicted.step_ns / 1e6,
            "measured_ms": measured.step_ns / 1e6,
            "replans": sum("planned again" in text for text in heard.lines),
            "said": heard.lines,
        }

    def _seeded(self, model: Any) -> list[torch.Tensor]:
        random.seed(1)
        torch.manual_seed(1)
        step(model, self.load)
        found = gradients(self.load)
        self._clear()
        return found

    def _clear(self) -> None:
        for parameter in self.load.model.parameters():
            parameter.grad = None

    def _peak(self, model: Any) -> int:
        """What a step adds to what was allocated before it."""
        self._clear()
        if not self.on_gpu:
            from rekindle.profile.cpu_allocator import allocator_deltas, peak_of

            return peak_of(allocator_deltas(lambda: step(model, self.load)))
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step(model, self.load)
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
        self._clear()
        return peak

    def _timed(self, model: Any) -> float:
        run: Callable[[], Any] = lambda: step(model, self.load)  # noqa: E731
        once = timed(run, self.device, 1)["ms"]
        found = timed(run, self.device, 3 if once > SLOW_MS else 9)["ms"]
        self._clear()
        return float(found)


class _Heard(logging.Handler):
    """The warnings that Rekindle writes to its log."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []
        logging.getLogger("rekindle").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def stop(self) -> None:
        logging.getLogger("rekindle").removeHandler(self)


def said(error: Exception) -> Record:
    """The first line of an error, and where it came from."""
    first = next(iter(str(error).splitlines()), "")
    frame = traceback.extract_tb(error.__traceback__)[-1]
    place = f"{Path(frame.filename).name}:{frame.lineno}"
    return {"error": f"{type(error).__name__}: {first}"[:400], "place": place}


# ---- all of them


def read(path: Path) -> dict[tuple[str, str], Record]:
    """The last record of each case."""
    lines = path.read_text().splitlines() if path.exists() else []
    records = [json.loads(text) for text in lines]
    return {(r["model"], r["budget"]): r for r in records}


def budgets_of(name: str, args: argparse.Namespace) -> tuple[str, ...]:
    if args.budgets is not None:
        return tuple(args.budgets.split(","))
    return OF_EXPERTS if name in EXPERT_MODELS else BUDGETS


def run_due(models: list[str], args: argparse.Namespace) -> None:
    stop = time.monotonic() + args.deadline
    known = {} if args.again else read(args.records)
    due = {
        name: [
            budget
            for budget in budgets_of(name, args)
            if (name, budget) not in known or "error" in known[name, budget]
        ]
        for name in models
    }
    due = {name: budgets for name, budgets in due.items() if budgets}
    before = args.records.read_text().count("\n") if args.records.exists() else 0
    commands = [
        [
            sys.executable, __file__, "--here", "--models", name, "--budgets", ",".join(budgets),
            "--device", args.device, "--time-limit", str(args.time_limit), "--jobs", str(args.jobs),
            "--records", str(args.records), *(["--small"] if args.small else []),
        ]
        for name, budgets in due.items()
    ]  # fmt: skip
    ended = run_all(commands, args.jobs, stop, args.limit)
    lines = args.records.read_text().splitlines()[before:] if args.records.exists() else []
    written = {(r["model"], r["budget"]) for r in map(json.loads, lines)}
    for (name, budgets), in_time in zip(due.items(), ended, strict=True):
        missing = [b for b in budgets if (name, b) not in written]
        if in_time is None or (not in_time and time.monotonic() >= stop):
            continue
        why = "the process died" if in_time else f"not done in {args.limit:.0f} s"
        case = Case(name, args)
        for budget in missing:
            case.record(budget, {"error": why})


# ---- what is shown


def peak_of(record: Record) -> int:
    """Of the steps after those that are watched."""
    return max(record["peaks"][NUM_WATCHED:])


def off(record: Record) -> float:
    """Of the predicted time from the measured one."""
    return record["predicted_ms"] / record["measured_ms"] - 1


def line(record: Record) -> str:
    head = f"{record['model']:30} {record['budget']:5}"
    if "error" in record:
        return f"{head} {record['error']} {record.get('place', '')}"
    return (
        f"{head} {record['budget_bytes'] / 2**20:9.1f} MiB, peak {share(record):.3f} of it"
        f"  predicted {record['predicted_ms']:8.2f} ms, {100 * off(record):+6.1f} %"
        f"  eager {record['eager_ms']:7.1f}, {record['ms']:7.1f} ms"
        f"  grad {record['gradient_error']:.0e} ({record['eager_to_itself']:.0e})"
        f"  plan {record['capture_s']:.1f} + {record['profile_s']:.1f} + {record['plan_s']:.1f} s"
        f"  {'; '.join(record['said'])}"
    )


def share(record: Record) -> float:
    return peak_of(record) / record["budget_bytes"]


def notes(record: Record) -> str:
    told = [text for text in record["said"] if "planned again" not in text]
    smallest = any("best effort" in text for text in told)
    left = [text.split(";")[0] for text in told if "best effort" not in text]
    return "; ".join([*(["smallest found"] if smallest else []), *left])


def table(records: list[Record]) -> str:
    """TRUST.md"""
    done = [r for r in records if "error" not in r]
    failed = [r for r in records if "error" in r]
    above = [r for r in done if share(r) > 1]
    quiet = [r for r in done if r["jobs"] == 1]
    far = sorted(abs(off(r)) for r in quiet)
    text = [
        "# Budgets kept, times as predicted",
        "",
        "Models that no test names and those of `compare.py`, one NVIDIA H200, the loss outside of",
        "the model. Made by `python benchmarks/gpu/trust.py --table` from `trust.jsonl`.",
        "",
        "| what | |",
        "|---|---|",
        f"| models | {len({r['model'] for r in done})} |",
        f"| cases | {len(done)}, and {len(failed)} with an error |",
        f"| peak of steps 4 to 6 above the budget | {len(above)} |",
        f"| cases timed on a machine that did nothing else | {len(quiet)} |",
    ]
    if far:
        mean, worst = sum(far) / len(far), far[-1]
        text += [
            f"| predicted time off by, mean and worst | {100 * mean:.1f} %, {100 * worst:.1f} % |",
            f"| off by more than 10 % | {sum(f > 0.1 for f in far)} |",
        ]
    text += [
        "",
        "Peak: the highest of steps 4 to 6 over the budget. Replans: how often the first three",
        "steps led to another plan. Planning: reading the call, measuring ops (once per model),",
        "search. Times in brackets were taken while other processes used the host's cores (never",
        "the GPU): where the host is the slower side, a step takes longer then, by up to half.",
        "",
        "| model | budget | MiB | peak | eager ms | ms | predicted | off | replans | plan s | |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in records:
        if "error" in r:
            text.append(f"| {r['model']} | {r['budget']} | | | | | | | | | {r['error']} |")
            continue
        seconds = f"{r['capture_s']:.1f} + {r['profile_s']:.1f} + {r['plan_s']:.1f}"
        times = (f"{r[k]:.1f}" for k in ("eager_ms", "measured_ms", "predicted_ms"))
        cells = [*times, f"{100 * off(r):+.1f} %"]
        if r["jobs"] > 1:
            cells = [f"({cell})" for cell in cells]
        text.append(
            f"| {r['model']} | {r['budget']} | {r['budget_bytes'] / 2**20:.1f} | {share(r):.3f} "
            f"| {' | '.join(cells)} | {r['replans']} | {seconds} | {notes(r)} |"
        )
    return "\n".join(text) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(ALL))
    parser.add_argument("--budgets", help="default: 0.75,0.5,min; 0.8 for mixed experts")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--records", type=Path, default=HERE / "trust.jsonl")
    parser.add_argument("--time-limit", type=float, default=1.0, help="seconds for the solver")
    parser.add_argument("--jobs", type=int, default=1, help="how many at work at once")
    parser.add_argument("--limit", type=float, default=150.0, help="seconds for a model")
    parser.add_argument("--deadline", type=float, default=float("inf"), help="seconds for it all")
    parser.add_argument("--again", action="store_true", help="also what has a record")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--here", action="store_true", help="run in this process")
    args = parser.parse_args()
    models = args.models.split(",")
    for name in models:
        if name not in ALL:
            parser.error(f"there is no model {name!r}; the models are {', '.join(ALL)}")
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    if args.table:
        known = read(args.records)
        shown = [known[m, b] for m in ALL for b in budgets_of(m, args) if (m, b) in known]
        (HERE / "TRUST.md").write_text(table(shown))
        print(table(shown))
    elif args.here:
        for name in models:
            Case(name, args).run(list(budgets_of(name, args)))
    else:
        run_due(models, args)


if __name__ == "__main__":
    main()
