"""Thousands of broken problem, schedule, plan and device files: each gives an error of one sentence
with its exit code, or something valid. Nothing crashes, hangs, or runs code.

`PYTHONPATH=tests python tests/property/test_files_fuzz.py FIRST COUNT [KIND ...]` runs other cases.
"""

import contextlib
import io
import json
import random
import sys
import tempfile
import zlib
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import torch
from support.clocks import at_most_calls
from support.mutations import mutated_bytes, mutated_text
from support.random_transfers import random_transfer_problem, random_transfer_schedule
from support.reference_simulator import simulate as reference
from torch import nn

import rekindle
from rekindle.cli import main
from rekindle.core import (
    Problem,
    check_problem,
    keep_all,
    problem_hash,
    read_problem,
    read_schedule,
    simulate,
)
from rekindle.core.files import problem_from_record, problem_record, schedule_record
from rekindle.core.generate import chain, random_problem, transformer
from rekindle.errors import RekindleError
from rekindle.profile import load_device
from rekindle.profile.cache import _SUFFIX as CACHE_SUFFIX
from rekindle.profile.cache import cache_info

MOST_CALLS = 2_000_000  # of functions, for one case: a second or two; most take some hundreds
SENTENCE = 700  # characters
SOURCES = (
    *(random_problem(seed, num_ops) for seed, num_ops in ((1, 4), (2, 8), (3, 12))),
    *(chain(5), transformer(1, batch=2, dropout=True)),
    *(random_transfer_problem(random.Random(seed), 8) for seed in (1, 4)),
)


def changed(record: Any, chance: random.Random) -> bytes:
    if chance.random() < 0.3:
        return mutated_bytes(json.dumps(record).encode(), chance)
    return mutated_text(record, chance)


def understood(read: Callable[[], Any]) -> Any:
    """What was read, or None where it was refused in one sentence."""
    found, sentence = None, None
    with at_most_calls(MOST_CALLS):
        try:
            found = read()
        except RekindleError as error:
            sentence = str(error)
    assert sentence is None or 10 < len(sentence.encode("utf-8")) < SENTENCE, sentence[:2000]
    return found


def command(*arguments: object) -> tuple[int, str]:
    """The exit code and the output of a command; an error is one line, never a traceback."""
    out, err = io.StringIO(), io.StringIO()
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        at_most_calls(MOST_CALLS),
    ):
        code = main([str(a) for a in arguments])
    assert code in (0, 1, 2, 3), code
    if code == 2:
        assert out.getvalue() == ""
        assert err.getvalue().startswith("rekindle: ")
        assert err.getvalue().count("\n") == 1
    return code, out.getvalue()


def problem_case(seed: int, path: Path) -> bool:
    """Whether the changed file was still a problem; if so, everything about it holds."""
    chance = random.Random(seed)
    path.write_bytes(changed(problem_record(chance.choice(SOURCES)), chance))
    problem = understood(lambda: read_problem(path))
    arguments = ("solve", path, "--budget", "0.7", "--solver", "floor", "--json", "-q")
    if problem is None:
        if seed % 5 == 0:
            assert command(*arguments)[0] == 2
        return False
    check_problem(problem)
    peak = holds_up(problem)
    if seed % 3 == 0:
        code, out = command(*arguments)
        assert code in (0, 3) or (peak == 0 and code == 2)
        answer = json.loads(out) if out else {}
        assert code or answer["peak"] <= answer["budget"]
    return True


def holds_up(problem: Problem) -> int:
    """Written and read it is the same; the native simulation is the reference's."""
    hash_before = problem_hash(problem)
    again = problem_from_record(json.loads(json.dumps(problem_record(problem))))
    assert again == problem
    assert problem_hash(again) == hash_before
    trace = simulate(problem, keep_all(problem))
    if len(problem.ops) <= 40:
        expected = reference(problem, keep_all(problem))
        assert (trace.memory, trace.cost) == (expected.memory, expected.cost)
    return trace.peak


def schedule_case(seed: int, folder: Path) -> bool:
    chance = random.Random(seed)
    problem = chance.choice(SOURCES)
    (folder / "problem.json").write_text(json.dumps(problem_record(problem)))
    path = folder / "schedule.json"
    steps = keep_all(problem)
    if problem.transfers is not None:
        steps = random_transfer_schedule(problem, chance)
    path.write_bytes(changed(schedule_record(problem, steps, "floor", 1), chance))
    schedule = understood(lambda: read_schedule(path, problem))
    if schedule is not None:
        understood(lambda: simulate(problem, schedule))
    if seed % 5 == 0:
        code, _ = command("check", folder / "problem.json", path, "--budget", "1.0", "--json")
        assert (code == 2) == (schedule is None)
    return schedule is not None


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    rekindle.plan(*sample(), budget=0.8, time_limit_s=2, profile="estimate").save(path)
    return path


def sample() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    torch.manual_seed(0)
    layers = (layer for _ in range(4) for layer in (nn.Linear(16, 16), nn.GELU()))
    return nn.Sequential(*layers), (torch.randn(64, 16),)


def plan_case(seed: int, source: dict[str, Any], path: Path) -> bool:
    """A changed plan is refused when it is read, or when it is applied, or gives eager's step."""
    chance = random.Random(seed)
    path.write_bytes(changed(source, chance))
    if seed % 2:
        name_the_problem_again(path)
    stored = understood(lambda: rekindle.Plan.load(path))
    if stored is None:
        return False
    assert stored.peak_bytes <= (stored.budget_bytes or stored.peak_bytes)
    assert stored.overhead > -1
    if seed % 4 < 2:
        model, args = sample()
        managed = understood(lambda: stored.apply(model, args, on_miss="raise"))
        assert managed is None or rekindle.verify(model, managed, args).equal
    return True


def name_the_problem_again(path: Path) -> None:
    """With the hash of the changed problem, what follows the comparison of hashes is reached."""
    with contextlib.suppress(ValueError, LookupError, TypeError, RecursionError, RekindleError):
        record = json.loads(path.read_bytes())
        record["schedule"]["problem"] = problem_hash(problem_from_record(record["problem"]))
        path.write_text(json.dumps(record))


def device_case(seed: int, path: Path) -> bool:
    chance = random.Random(seed)
    text = resources.files("rekindle.profile").joinpath("devices.toml").read_bytes()
    own = b'[own]\nlike = "h100"\nlaunch_ns = 3\n[own.flops]\nfloat32 = 1e12\n' + text
    path.write_bytes(mutated_bytes(chance.choice((own, text)), chance))
    return understood(lambda: load_device(path)) is not None


def cache_case(seed: int, path: Path) -> bool:
    """A spoilt cache is no error: what cannot be read was never measured."""
    chance = random.Random(seed)
    numbers = {"device_ns": 3, "host_ns": 1, "cost_ns": 3, "workspace_bytes": 0}
    record = {"key": "k", "op": "aten.mm", "output_bytes": [8], **numbers}
    body = mutated_text(chance.choice((record, {"environment": {"device": "cpu"}})), chance)
    line = b"%08x %b\n" % (zlib.crc32(body), body)
    path.write_bytes(line if chance.random() < 0.7 else mutated_bytes(line, chance))
    (info,) = cache_info(path.parent)
    return info.num_ops > 0


@pytest.mark.parametrize("block", range(4))
def test_problem_files(block: int, tmp_path: Path) -> None:
    valid = sum(problem_case(1000 * block + k, tmp_path / "p.json") for k in range(500))
    assert 30 < valid < 400  # the changes are neither all harmless nor all fatal


def test_schedule_files(tmp_path: Path) -> None:
    assert 80 < sum(schedule_case(seed, tmp_path) for seed in range(800)) < 600


def test_plan_files(plan_file: Path, tmp_path: Path) -> None:
    source = json.loads(plan_file.read_text())
    assert 20 < sum(plan_case(seed, source, tmp_path / "plan.json") for seed in range(600)) < 400


def test_device_files(tmp_path: Path) -> None:
    assert 30 < sum(device_case(seed, tmp_path / "own.toml") for seed in range(300)) < 250


def test_cache_files(tmp_path: Path) -> None:
    assert 10 < sum(cache_case(seed, tmp_path / f"own{CACHE_SUFFIX}") for seed in range(300)) < 250


def campaign(first: int, count: int, kinds: list[str]) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rekindle.plan(*sample(), budget=0.8, profile="estimate").save(folder / "source.json")
        source = json.loads((folder / "source.json").read_text())
        cases: dict[str, Callable[[int], object]] = {
            "problem": lambda seed: problem_case(seed, folder / "p.json"),
            "schedule": lambda seed: schedule_case(seed, folder),
            "plan": lambda seed: plan_case(seed, source, folder / "plan.json"),
            "device": lambda seed: device_case(seed, folder / "own.toml"),
            "cache": lambda seed: cache_case(seed, folder / f"own{CACHE_SUFFIX}"),
        }
        for kind in kinds or cases:
            case = cases[kind]
            valid = failed = 0
            for seed in range(first, first + count):
                try:
                    valid += bool(case(seed))
                except Exception as error:
                    failed += 1
                    text = " ".join(f"{type(error).__name__}: {error}".split())
                    print(f"{kind} {seed}: {text[:300]}", flush=True)
            print(f"{kind}: {count} cases, {valid} valid, {failed} failed", flush=True)


if __name__ == "__main__":
    campaign(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
