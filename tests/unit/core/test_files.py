import hashlib
import json
import os
import pickle
import stat

import pytest

from rekindle.core import (
    Op,
    Problem,
    Schedule,
    Value,
    keep_all,
    problem_hash,
    read_problem,
    read_schedule,
    write_problem,
    write_schedule,
)
from rekindle.core.disk import read_json, write_json
from rekindle.core.files import problem_from_record, problem_record
from rekindle.core.generate import chain, random_problem, transformer, unet
from rekindle.errors import FileError, InvalidProblem, InvalidSchedule

# Every field once with its default and once without, and text beyond ASCII.
VECTOR = Problem(
    values=(Value("w", 8), Value("größe", 16), Value("y", 16), Value("g", 0), Value("gw", 8)),
    ops=(
        Op("f", 3, (0,), (1,), phase="forward"),
        Op("relu", 1, (1,), (2,), workspace=4, inplace=((1, 2),), phase="forward"),
        Op("loss", 0, (2,), (3,), phase="loss"),
        Op("f.backward", 7, (3, 0), (4,), recomputable=False, phase="backward", grad_of=0),
    ),
    resident=(0,),
    outputs=(4,),
    held=(2,),
    name="vector",
)
CANONICAL = (
    '{"cost_unit":"ns","format":"rekindle.problem","held":[2],"name":"vector","ops":['
    '{"cost":3,"inputs":[0],"name":"f","outputs":[1],"phase":"forward"},'
    '{"cost":1,"inplace":[[1,2]],"inputs":[1],"name":"relu","outputs":[2],"phase":"forward",'
    '"workspace":4},'
    '{"cost":0,"inputs":[2],"name":"loss","outputs":[3],"phase":"loss"},'
    '{"cost":7,"grad_of":0,"inputs":[3,0],"name":"f.backward","outputs":[4],"phase":"backward",'
    '"recomputable":false}],"outputs":[4],"resident":[0],"size_unit":"bytes","values":['
    '{"name":"w","size":8},{"name":"größe","size":16},{"name":"y","size":16},'
    '{"name":"g","size":0},{"name":"gw","size":8}],"version":1}'
)


def test_hash_vector():
    assert hashlib.sha256(CANONICAL.encode("utf-8")).hexdigest() == problem_hash(VECTOR)
    assert problem_hash(VECTOR) == HASH


HASH = "94f8d3d4b889a35511332ef76841b5e17ba5dffa9658bdb8f9a4dcc8165e6155"


def test_defaults_do_not_change_the_hash(tmp_path):
    record = json.loads(CANONICAL)
    for op in record["ops"]:
        defaults = {"workspace": 0, "recomputable": True, "inplace": [], "grad_of": None}
        op |= defaults | op
    path = tmp_path / "problem.json"
    path.write_text(json.dumps(record, indent=3), encoding="utf-8")
    assert read_problem(path) == VECTOR
    assert problem_hash(read_problem(path)) == HASH


@pytest.mark.parametrize(
    "problem",
    [VECTOR, chain(5), unet(2), transformer(2, dropout=True), Problem((), ())]
    + [random_problem(seed, 12) for seed in range(20)],
    ids=lambda problem: problem.name,
)
def test_round_trip(problem, tmp_path):
    path = tmp_path / "problem.json"
    write_problem(path, problem)
    assert read_problem(path) == problem
    assert problem_from_record(problem_record(problem)) == problem
    assert problem.native is not None
    assert pickle.loads(pickle.dumps(problem)) == problem
    schedule_path = tmp_path / "schedule.json"
    write_schedule(schedule_path, problem, keep_all(problem), "keep-all", 3)
    assert read_schedule(schedule_path, problem) == keep_all(problem)
    record = json.loads(schedule_path.read_text(encoding="utf-8"))
    assert record["format"] == "rekindle.schedule"
    assert record["problem"] == problem_hash(problem)
    assert (record["solver"], record["seed"]) == ("keep-all", 3)


@pytest.mark.parametrize("name", ["RL1", "RL2", "RL3", "RL4", "CM1", "CM2"])
def test_public_instances_are_canonical(name, instances):
    """What was read and is written again is the same data."""
    record = json.loads((instances / f"{name}.json").read_text(encoding="utf-8"))
    assert problem_record(read_problem(instances / f"{name}.json")) == record


def test_invalid_problems_and_schedules_are_not_written(tmp_path):
    path = tmp_path / "out.json"
    with pytest.raises(InvalidProblem):
        write_problem(path, Problem((Value("v", -1),), (Op("f", 1, (), (0,)),)))
    with pytest.raises(InvalidSchedule):
        write_schedule(path, VECTOR, Schedule((1, 0)))
    assert list(tmp_path.iterdir()) == []


def test_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "out.json"
    write_json(path, {"old": 1})

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(FileError, match="No space left"):
        write_json(path, {"new": 2})
    assert read_json(path) == {"old": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["out.json"]


def test_a_written_file_has_the_usual_rights(tmp_path):
    path = tmp_path / "out.json"
    old = os.umask(0o027)
    try:
        write_json(path, {})
    finally:
        os.umask(old)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_unwritable_places(tmp_path):
    with pytest.raises(FileError, match="cannot be written"):
        write_json(tmp_path / "missing" / "out.json", {})
    (tmp_path / "folder").mkdir()
    with pytest.raises(FileError, match="cannot be written"):
        write_json(tmp_path / "folder", {})
    assert [p.name for p in tmp_path.iterdir()] == ["folder"]


def test_schedule_record_errors_are_about_the_schedule(tmp_path):
    path = tmp_path / "schedule.json"
    write_schedule(path, VECTOR, keep_all(VECTOR))
    record = read_json(path)
    for change in ({"solver": 3}, {"extra": 1}, {"ops": "0123"}):
        write_json(path, record | change)
        with pytest.raises(InvalidSchedule, match=r"schedule\.json: "):
            read_schedule(path, VECTOR)
    write_json(path, record | {"ops": [0, 1, 2, True]})
    with pytest.raises(InvalidSchedule, match="step 3 names op True"):
        read_schedule(path, VECTOR)
