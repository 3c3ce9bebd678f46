"""The disk cache under everything that may happen to it."""

import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rekindle.profile import OpProfile, Source
from rekindle.profile.cache import ProfileCache, cache_clear, cache_dir, cache_info, environment

RECORD = {"device": "test", "torch": "9.9"}


def key(i):
    return f'["op.{i}",[],{{}}]'


def op(i):
    return OpProfile(i, 2 * i, (3 * i, 0), Source.MEASURED, device_ns=i, host_ns=7)


def test_round_trip(tmp_path):
    cache = ProfileCache(RECORD, tmp_path)
    assert cache.get(key(1)) is None
    cache.put([(key(i), op(i)) for i in range(5)])
    for reader in (cache, ProfileCache(RECORD, tmp_path)):
        for i in range(5):
            found = reader.get(key(i))
            assert found == op(i).as_cached()
    assert ProfileCache({**RECORD, "torch": "9.8"}, tmp_path).get(key(1)) is None
    (info,) = cache_info(tmp_path)
    assert (info.device, info.torch_version, info.num_ops) == ("test", "9.9", 5)
    assert cache_clear(tmp_path) == 1
    assert cache_info(tmp_path) == ()
    assert ProfileCache(RECORD, tmp_path).get(key(1)) is None


def test_later_measurements_win(tmp_path):
    cache = ProfileCache(RECORD, tmp_path)
    cache.put([(key(1), op(1))])
    cache.put([(key(1), op(9))])
    assert ProfileCache(RECORD, tmp_path).get(key(1)).device_ns == 9


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.lists(st.tuples(st.floats(0, 0.999), st.binary(max_size=9), st.integers(0, 9))))
def test_damage_costs_lines_and_never_lies(tmp_path, damages):
    cache = ProfileCache(RECORD, tmp_path)
    cache_clear(tmp_path)
    cache.put([(key(i), op(i)) for i in range(4)])
    data = bytearray(cache.path.read_bytes())
    for where, junk, cut in damages:
        at = int(where * len(data))
        data[at : at + cut] = junk
    cache.path.write_bytes(bytes(data))
    reader = ProfileCache(RECORD, tmp_path)
    for i in range(4):
        assert reader.get(key(i)) in (None, op(i).as_cached())
    reader.put([(key(7), op(7))])
    assert ProfileCache(RECORD, tmp_path).get(key(7)) == op(7).as_cached()


@pytest.mark.parametrize(
    "content", [b"", b"\x80\x04N.", pickle.dumps([1]), b"{}\n", b"\xff" * 100, b"00000000 {}\n"]
)
def test_a_file_of_anything_else_is_no_cache(tmp_path, content):
    cache = ProfileCache(RECORD, tmp_path)
    cache.path.write_bytes(content)
    assert cache.get(key(1)) is None
    cache.put([(key(1), op(1))])
    assert ProfileCache(RECORD, tmp_path).get(key(1)) == op(1).as_cached()


def write_many(directory, first):
    cache = ProfileCache(RECORD, Path(directory))
    for i in range(first, first + 40):
        cache.put([(key(i), op(i)), (key(10_000 + i), op(i))])


def test_concurrent_writers_lose_nothing(tmp_path):
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=write_many, args=(str(tmp_path), 100 * w)) for w in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    reader = ProfileCache(RECORD, tmp_path)
    for w in range(4):
        for i in range(100 * w, 100 * w + 40):
            assert reader.get(key(i)) == op(i).as_cached()
            assert reader.get(key(10_000 + i)) == op(i).as_cached()


def test_a_killed_writer_costs_at_most_its_own_line(tmp_path):
    script = (
        "import sys; sys.path.insert(0, sys.argv[2])\n"
        "import test_profile_cache as t\n"
        "cache = t.ProfileCache(t.RECORD, t.Path(sys.argv[1]))\n"
        "i = 0\n"
        "while True:\n"
        "    cache.put([(t.key(i % 500), t.op(i % 500))]); i += 1\n"
    )
    here = str(Path(__file__).parent)
    worker = subprocess.Popen([sys.executable, "-c", script, str(tmp_path), here])
    cache = ProfileCache(RECORD, tmp_path)
    try:
        while worker.poll() is None and not (
            cache.path.exists() and cache.path.stat().st_size > 20_000
        ):
            time.sleep(0.01)
    finally:
        os.kill(worker.pid, signal.SIGKILL)
        worker.wait()
    with cache.path.open("ab") as file:  # and one torn in the middle, as a full disk leaves it
        file.write(b'1234abcd {"key":"tor')
    cache.put([(key(900), op(900))])
    reader = ProfileCache(RECORD, tmp_path)
    assert reader.get(key(900)) == op(900).as_cached()
    assert reader.get(key(0)) == op(0).as_cached()


def test_a_place_that_cannot_be_written_is_no_error(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    cache = ProfileCache(RECORD, blocked / "below")
    cache.put([(key(1), op(1))])
    assert cache.get(key(1)) is None


def test_where_it_is(monkeypatch, tmp_path):
    monkeypatch.setenv("REKINDLE_CACHE_DIR", str(tmp_path))
    assert cache_dir() == tmp_path / "profile"
    monkeypatch.delenv("REKINDLE_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "xdg" / "rekindle" / "profile"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_dir() == tmp_path / ".cache" / "rekindle" / "profile"


def test_settings_that_pick_kernels_are_part_of_the_environment(tmp_path):
    def path():
        return ProfileCache(environment(torch.device("cpu")), tmp_path).path

    before = path()
    num_threads = torch.get_num_threads()
    torch.set_num_threads(num_threads + 1)
    try:
        assert path() != before
    finally:
        torch.set_num_threads(num_threads)
    torch.set_float32_matmul_precision("high")
    try:
        assert path() != before
    finally:
        torch.set_float32_matmul_precision("highest")
    assert path() == before
