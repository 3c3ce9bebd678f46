"""GPT-2 at many lengths: what a length that is seen for the first time costs, and its overhead.

    python benchmarks/shapes/lengths.py                       # 24 layers, 100 lengths to 1024
    python benchmarks/shapes/lengths.py --small --steps 5     # narrow layers; steps against eager
    python benchmarks/shapes/lengths.py --json lengths.jsonl  # a line of JSON per case

Printed: the seconds of the first plan and of the family's capture; per length the time until its
plan is chosen ("first sight") and later ("again"), by the clock and in processor time of the
thread; overhead against a plan that was made for that length alone. Lengths come in random order.
"""

import argparse
import copy
import json
import random
import statistics
import time
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import rekindle
from rekindle.runtime.managed_module import KEY
from rekindle.runtime.plan_table import FamilyEntry


def model_of(args: argparse.Namespace) -> torch.nn.Module:
    small = {"n_embd": 64, "n_head": 4, "vocab_size": 200}
    large = {"n_embd": 1024, "n_head": 16}
    config = GPT2Config(
        n_layer=args.layers,
        n_positions=1024,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
        **(small if args.small else large),
    )
    torch.manual_seed(0)
    return GPT2LMHeadModel(config).to(args.device)


def ids_of(args: argparse.Namespace, length: int) -> dict[str, torch.Tensor]:
    vocabulary = 200 if args.small else 50257
    ids = torch.randint(vocabulary, (args.batch, length), device=args.device)
    return {"input_ids": ids, "labels": ids}


def step(model: torch.nn.Module, kwargs: dict[str, torch.Tensor]) -> list[Any]:
    torch.manual_seed(1)
    model.zero_grad()
    loss = model(**kwargs).loss
    loss.backward()
    return [loss.detach(), *[p.grad for p in model.parameters()]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--lengths", type=int, default=100)
    parser.add_argument("--longest", type=int, default=1024)
    parser.add_argument("--budget", default="0.6")
    parser.add_argument("--alone", type=int, default=10, help="lengths that are planned alone too")
    parser.add_argument("--small", action="store_true")
    parser.add_argument(
        "--steps", type=int, default=0, help="lengths that run, compared with eager"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json")
    args = parser.parse_args()
    say = Lines(args.json)

    drawn = random.Random(0).sample(range(32, args.longest + 1), args.lengths)
    model = model_of(args)
    reference = copy.deepcopy(model) if args.steps else None
    # The budget of the longest, so that short ones keep everything.
    longest = ids_of(args, max(drawn))
    options: dict[str, Any] = {"profile": "estimate", "cache": False, "time_limit_s": 10.0}
    if args.device == "cuda":
        options |= {"device_profile": None}
    probe = rekindle.plan(model, (), longest, budget=1.0, **options)
    budget = int(float(args.budget) * probe.keep_all_peak_bytes)
    begun = time.perf_counter()
    managed = rekindle.rematerialize(
        model, (), ids_of(args, drawn[0]), budget=budget, dynamic=True, **options
    )
    say(case="first plan", seconds=time.perf_counter() - begun, budget=budget)
    begun = time.perf_counter()
    step(managed, ids_of(args, drawn[1]))
    say(case="second shape: capture, search, code, one step", seconds=time.perf_counter() - begun)
    families = [e.family for e in managed.__dict__[KEY].entries if isinstance(e, FamilyEntry)]
    family = families[0]

    sights, again = [], []
    begun = time.perf_counter()
    for length in drawn[2:]:
        clock, used = time.perf_counter(), time.thread_time()
        plan = family.plan_at((length,))
        sights.append((time.perf_counter() - clock, time.thread_time() - used))
        clock = time.perf_counter()
        family.plan_at((length,))
        again.append(time.perf_counter() - clock)
        assert plan.peak_bytes <= plan.budget_bytes == budget
    say(
        case="first sight of a length",
        median_ms=1e3 * statistics.median(s for s, _ in sights),
        largest_ms=1e3 * max(s for s, _ in sights),
        median_thread_ms=1e3 * statistics.median(s for _, s in sights),
        again_median_ms=1e3 * statistics.median(again),
    )
    family.wait()
    say(
        case=f"all {len(drawn)} lengths, searches in the background included",
        seconds=time.perf_counter() - begun,
        schedules=len(family.rungs),
        families=len(families),
    )
    for length in sorted(drawn)[:: max(1, len(drawn) // max(1, args.alone))][: args.alone]:
        mine = family.plan_at((length,))
        alone = rekindle.plan(model, (), ids_of(args, length), budget=budget, **options)
        say(
            case=f"overhead at {length}",
            family_percent=100 * mine.overhead,
            alone_percent=100 * alone.overhead,
            family_peak=mine.peak_bytes,
            alone_peak=alone.peak_bytes,
        )
    for length in drawn[: args.steps]:
        given = ids_of(args, length)
        pairs = zip(step(managed, given), step(reference, given), strict=True)
        say(case=f"step at {length}", equal=all(torch.equal(a, b) for a, b in pairs))


class Lines:
    """Prints cases, and writes them as lines of JSON."""

    def __init__(self, path: str | None) -> None:
        self.path = path

    def __call__(self, **found: Any) -> None:
        shown = [f"{k} {v:.2f}" if isinstance(v, float) else f"{k} {v}" for k, v in found.items()]
        print("  ".join(shown).removeprefix("case "), flush=True)
        if self.path is not None:
            with open(self.path, "a", encoding="utf-8") as file:
                print(json.dumps(found), file=file)


if __name__ == "__main__":
    main()
