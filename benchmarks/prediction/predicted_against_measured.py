"""Predicted and measured peak and step time, side by side, for each model and budget.

    predicted_against_measured.py [--device cuda|cpu] [--small] [--cases a,b] [--budgets 1.0,0.7]
        [--experiment table|profiling|all] [--solver NAME] [--time-limit S] [--deadline S]

- `table`: budgets of 100, 70, 50, 30 and 25 % of keep-all. Must hold: measured peak <= predicted
  peak <= budget; predicted <= 1.02 x measured; time within 10 %. The rows of 100, 50 and 25 % are
  also shown as in Appendix D.8 of FastSA: memory simulated and real, time increase simulated and
  real, both against eager.
- `profiling`: how long profiling takes for 24 and 96 layers of GPT-2, and again from the cache.

Results go to a JSON file, rewritten after every case, in which the rows of cases that are not asked
for stay; a short table comes last. Without a GPU the
same runs on the CPU in small configurations.
"""

import argparse
import dataclasses
import gc
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2] / "src"))

import cases
import torch

from rekindle import BudgetInfeasible, measure
from rekindle.pipeline import plan_joint
from rekindle.plan_object import Plan, make_plan, manage_plan
from rekindle.plans.options import Options
from rekindle.predict import StepMeasurement
from rekindle.profile.block_sizes import expandable_segments
from rekindle.runtime.measured_step import sample_of

Row = dict[str, Any]


def main() -> None:
    args = _arguments()
    device = torch.device(args.device)
    torch.manual_seed(0)
    bench = Bench(args, device)
    for experiment in ("profiling", "table"):
        if args.experiment in (experiment, "all"):
            getattr(bench, experiment)()
    bench.show()
    sys.exit(1 if bench.num_broken else 0)


class Bench:
    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        self.args, self.device = args, device
        self.start = time.monotonic()
        self.rows: list[Row] = []
        self.profiling_rows: list[Row] = []
        self.notes: list[str] = []
        self._keep_others()

    # ---- experiments

    def table(self) -> None:
        for case in self._chosen():
            self._guarded(case.name, lambda case=case: self._case(case))

    def profiling(self) -> None:
        """24 layers from nothing, 96 layers from nothing, 96 layers from the cache."""
        for num_layers, fresh in ((24, True), (96, True), (96, False)):
            self._guarded("profiling", lambda n=num_layers, f=fresh: self._profiling(n, f))

    def _profiling(self, num_layers: int, fresh: bool) -> None:
        if fresh:
            os.environ["REKINDLE_CACHE_DIR"] = tempfile.mkdtemp()
        model, inputs = cases.gpt2(self.device, self.args.small, num_layers, batch=1)
        if self.args.small:  # the factory caps small models; here depth is what is asked
            model.model.transformer.h.extend(
                type(model.model.transformer.h[0])(model.model.config, layer_idx=i)
                for i in range(len(model.model.transformer.h), num_layers)
            )
        options = self._options(schedule=_keep_all)
        plan = make_plan(options, model.to(self.device), inputs, {})
        row = {
            "layers": num_layers,
            "from": "nothing" if fresh else "cache",
            "num_ops": len(plan.profile),
            "num_distinct": len(plan.profile.ops),
            "profiling_s": round(plan.profile.wall_s, 3),
        }
        self.profiling_rows.append(row)
        print(json.dumps(row), flush=True)
        self._save()

    def _case(self, case: cases.Case) -> None:
        model, inputs = case.make(self.device, self.args.small)
        model.train()
        eager = self._measured(model, inputs)
        begin = time.monotonic()
        first = make_plan(self._options(schedule=_keep_all), model, inputs, {})
        took = time.monotonic() - begin
        whole = first.predict()
        base = {
            "case": case.name,
            "eager_peak": eager.peak_bytes,
            "eager_ns": eager.step_ns,
            "first_plan_s": round(took, 2),
            "profiling_s": round(first.profile.wall_s, 2),
            "not_measured": [list(item) for item in first.profile.not_measured],
        }
        for budget in self.args.budgets:
            if self._is_late():
                self.notes.append(f"{case.name} {budget}: no time left")
                continue
            self._guarded(
                f"{case.name} {budget}",
                lambda budget=budget: self._budget(base, model, inputs, first, whole, budget),
            )

    def _budget(
        self, base: Row, model: torch.nn.Module, inputs: Any, first: Plan, whole: Any, budget: float
    ) -> None:
        begin = time.monotonic()
        options = self._options(budget=budget, schedule=_keep_all if budget == 1.0 else None)
        try:
            assert first.reading is not None
            sample = sample_of(first.joint, [given.value for given in first.reading.inputs])
            made = plan_joint(options, first.joint, base["case"], sample, reading=first.reading)
            plan = Plan(*made)
        except BudgetInfeasible as error:
            print(f"{base['case']} {budget}: {error}", flush=True)
            self.notes.append(f"{base['case']} {budget}: not reachable")
            return
        planned = time.monotonic() - begin
        predicted = plan.predict()
        managed = manage_plan(options, plan, model, inputs)
        found = self._measured(managed, inputs)
        row = base | {
            "budget": budget,
            "budget_bytes": plan.budget_bytes,
            "solver": plan.solver,
            "plan_s": round(planned, 2),
            "simulated_peak": plan.peak_bytes,
            "predicted_peak": predicted.peak_bytes,
            "measured_peak": found.peak_bytes,
            "reserved": found.reserved_bytes,
            "predicted_ns": predicted.step_ns,
            "cost_ns": plan.cost_ns,
            "keep_all_predicted_ns": whole.step_ns,
            "measured_ns": found.step_ns,
            "device_ns": _total(plan, "device_ns"),
            "host_ns": _total(plan, "host_ns"),
            "sources": {str(k): v for k, v in plan.profile.num_by_source.items()},
        }
        self.rows.append(row)
        print(_line(row), flush=True)
        self._save()

    # ---- running

    def _measured(self, model: torch.nn.Module, inputs: Any) -> StepMeasurement:
        # The allocator's blocks and the host's caches settle over some steps.
        return measure(model, inputs, num_steps=self.args.steps, num_warmup=5)

    def _options(self, **changes: Any) -> Options:
        options = Options(
            budget=None,
            solver=self.args.solver,
            time_limit_s=self.args.time_limit,
            seed=0,
            profile="measure",
            loss_fn=None,
            schedule=None,
            on_miss="raise",
        )
        return dataclasses.replace(options, **changes)

    def _guarded(self, what: str, run: Callable[[], None]) -> None:
        """One case must not take the others down."""
        if self._is_late():
            self.notes.append(f"{what}: no time left")
            return
        try:
            run()
        except Exception as error:
            traceback.print_exc()
            self.notes.append(f"{what}: {type(error).__name__}: {str(error)[:200]}")
            self._save()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _chosen(self) -> Iterator[cases.Case]:
        wanted = self.args.cases.split(",") if self.args.cases else None
        return (c for c in cases.CASES if wanted is None or c.name in wanted)

    def _is_late(self) -> bool:
        return time.monotonic() - self.start > self.args.deadline

    # ---- results

    def _keep_others(self) -> None:
        """With `--cases`, the stored rows of other cases on this device stay."""
        path = Path(self.args.out)
        if not self.args.cases or not path.exists():
            return
        old = json.loads(path.read_text())
        if {key: old[key] for key in self._where()} != self._where():
            return
        chosen = {case.name for case in self._chosen()}
        self.rows = [row for row in old["rows"] if row["case"] not in chosen]
        self.notes = [note for note in old["notes"] if note.split()[0] not in chosen]
        if self.args.experiment == "table":
            self.profiling_rows = old["profiling"]

    def _where(self) -> Row:
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu"
        return {
            "device": name,
            "torch": torch.__version__,
            "expandable_segments": expandable_segments(),
            "small": self.args.small,
        }

    @property
    def num_broken(self) -> int:
        """Rows of the table whose promise on memory does not hold."""
        return sum(not _memory_holds(row) for row in self.rows)

    def _save(self) -> None:
        record = {
            **self._where(),
            "profiling": self.profiling_rows,
            "rows": self.rows,
            "notes": self.notes,
        }
        path = Path(self.args.out)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record, indent=1) + "\n")

    def show(self) -> None:
        self._save()
        for row in self.profiling_rows:
            print(
                f"profiling {row['layers']} layers from {row['from']}: {row['profiling_s']} s, "
                f"{row['num_ops']} ops, {row['num_distinct']} distinct"
            )
        table = self.rows
        if table:
            print(
                "\ncase              budget  measured GiB  pred/meas  pred/budget  "
                "measured ms  pred/meas"
            )
            for row in table:
                print(_line(row))
            errors = [abs(r["predicted_ns"] / r["measured_ns"] - 1) for r in table]
            ratios = [r["predicted_peak"] / r["measured_peak"] for r in table]
            print(
                f"{len(table)} rows; memory predicted/measured {min(ratios):.4f} to "
                f"{max(ratios):.4f}; time off by {100 * sum(errors) / len(errors):.1f} % on "
                f"average, {100 * max(errors):.1f} % at worst"
            )
        self._show_d8([r for r in self.rows if r["budget"] in (1.0, 0.5, 0.25)])
        for note in self.notes:
            print("note:", note)

    @staticmethod
    def _show_d8(rows: list[Row]) -> None:
        if not rows:
            return
        print("\nD.8: memory as a share of eager's, time as a multiple of eager's")
        print("case              budget   simulated   actual   time simulated   actual")
        for r in rows:
            print(
                f"{r['case']:17} {r['budget']:6.2f}   {r['simulated_peak'] / r['eager_peak']:9.3f}"
                f"   {r['measured_peak'] / r['eager_peak']:6.3f}"
                f"   {r['predicted_ns'] / r['keep_all_predicted_ns']:14.3f}"
                f"   {r['measured_ns'] / r['eager_ns']:6.3f}"
            )


def _keep_all(problem: Any) -> Any:
    from rekindle.core import keep_all

    return keep_all(problem)


def _total(plan: Plan, field: str) -> int:
    """Sum over the schedule, views included where they are first made."""
    from rekindle.program import charged_nodes

    nodes = charged_nodes(plan.program)
    per_op = [sum(getattr(plan.profile[n], field) for n in names) for names in nodes]
    return sum(per_op[i] for i in plan.schedule.ops)


def _memory_holds(row: Row) -> bool:
    within = row["measured_peak"] <= row["predicted_peak"]
    return within and (row["budget_bytes"] is None or row["predicted_peak"] <= row["budget_bytes"])


def _line(row: Row) -> str:
    ratio = row["predicted_peak"] / row["measured_peak"]
    share = row["predicted_peak"] / row["budget_bytes"] if row["budget_bytes"] else 0.0
    return (
        f"{row['case']:17} {row['budget']:6.2f}  {row['measured_peak'] / 2**30:12.3f}  "
        f"{ratio:9.4f}  {share:11.4f}  {row['measured_ns'] / 1e6:11.2f}  "
        f"{row['predicted_ns'] / row['measured_ns']:9.3f}"
        f"{'' if _memory_holds(row) else '  MEMORY DOES NOT HOLD'}"
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    has_gpu = torch.cuda.is_available()
    parser.add_argument("--device", default="cuda" if has_gpu else "cpu")
    parser.add_argument("--small", action="store_true", default=not has_gpu)
    parser.add_argument("--cases", default="")
    parser.add_argument("--budgets", default="1.0,0.7,0.5,0.3,0.25")
    parser.add_argument("--experiment", default="all")
    parser.add_argument("--solver", default="auto")
    parser.add_argument("--time-limit", type=float, default=4.0, help="per plan, in seconds")
    parser.add_argument("--deadline", type=float, default=480.0, help="no new case after this")
    parser.add_argument("--steps", type=int, default=10)
    out = Path(__file__).parent / f"results-{'h200' if has_gpu else 'cpu-small'}.json"
    parser.add_argument("--out", default=str(out))
    args = parser.parse_args()
    args.budgets = [float(b) for b in args.budgets.split(",")]
    return args


if __name__ == "__main__":
    main()
