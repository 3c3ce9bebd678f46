"""The link to host memory: in descriptions, in the cache, and how much memory may be used."""

import dataclasses
from pathlib import Path

import pytest

from rekindle.errors import DeviceProfileError
from rekindle.profile import device_names, load_device
from rekindle.profile import host_rates as module
from rekindle.profile.cache import ProfileCache
from rekindle.profile.host_rates import HostRates, spare_host_bytes
from rekindle.profile.measure_host import _checked

H200 = HostRates(55 * 10**9, 55 * 10**9, 10_000, 2**20, 0.3, 0.015)


def test_shipped_descriptions() -> None:
    assert load_device("h200").host == H200
    for name in device_names():
        found = load_device(name)
        assert found.host is not None
        assert found.host.overlaps is (found.kind == "cuda")
    link = H200.link(2**30)
    assert (link.to_host, link.latency, link.least) == (H200.to_host, 10_000, 2**20)
    assert (link.host_budget, link.serial) == (2**30, False)
    assert load_device("cpu").host.link(None).serial


@pytest.mark.parametrize(
    ("host", "message"),
    [
        ("1", "host has exactly the keys"),
        ("{ to_host = 1 }", "host has exactly the keys"),
        ("{ to_host = 1.5, REST }", "host to_host is a whole number above 0"),
        ("{ to_host = 0, REST }", "host to_host is a whole number above 0"),
        ("{ to_host = -1, REST }", "a number from 0 on"),
    ],
)
def test_a_description_that_is_wrong(host: str, message: str, tmp_path: Path) -> None:
    rest = "from_host = 1, latency_ns = 1, least_bytes = 1, memory_slowdown = 0"
    host = host.replace("REST", f"{rest}, compute_slowdown = 0.0")
    path = tmp_path / "own.toml"
    path.write_text(f'[own]\nlike = "h100"\ntitle = "own"\nhost = {host}\n', encoding="utf-8")
    with pytest.raises(DeviceProfileError, match=message):
        load_device(path)


def test_one_without_a_link(tmp_path: Path) -> None:
    """As every file was before links."""
    table = (Path(module.__file__).parent / "devices.toml").read_text("utf-8")
    kept = [row for row in table.split("\n") if not row.startswith("host = ")]
    path = tmp_path / "own.toml"
    path.write_text("\n".join(kept).replace("[h100]", "[mine]"), encoding="utf-8")
    assert load_device(f"{path}:mine").host is None


def test_measurements_are_kept(tmp_path: Path) -> None:
    cache = ProfileCache({"device": "some"}, tmp_path)
    assert cache.host_numbers() is None
    cache.put_host_numbers({"other": 1})
    cache.put_host_numbers(dataclasses.asdict(H200))
    again = ProfileCache({"device": "some"}, tmp_path)
    assert _checked(again.host_numbers()) == H200
    assert again.get("[]") is None


@pytest.mark.parametrize(
    "wrong", [{"to_host": 0}, {"to_host": True}, {"memory_slowdown": -0.1}, {"latency_ns": 1.0}]
)
def test_what_a_file_cannot_say(wrong: dict[str, object]) -> None:
    numbers = dataclasses.asdict(H200)
    assert _checked(numbers) == H200
    assert _checked(None) is None
    assert _checked({**numbers, "more": 1}) is None
    assert _checked({**numbers, **wrong}) is None


def test_memory_that_may_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    gib = 2**30
    monkeypatch.setattr(module, "_memory_of_machine", lambda: (64 * gib + 5, 40 * gib))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert spare_host_bytes() == 32 * gib
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert spare_host_bytes() == 4 * gib
    monkeypatch.setattr(module, "_memory_of_machine", lambda: (64 * gib, 3 * gib + 7))
    assert spare_host_bytes() == 3 * gib
    monkeypatch.undo()
    whole, free = module._memory_of_machine()
    assert 0 < free <= whole
