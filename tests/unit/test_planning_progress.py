"""D1: planning says how far it is, as lines in a log and as a live line on a terminal."""

import logging
from typing import Any

import pytest
import torch
from torch import nn

import rekindle
from rekindle import planning_progress
from rekindle.planning_progress import lines, planning_shown, shown_on_stderr
from rekindle.profile import ProfileProgress
from rekindle.solve.progress import Progress, current_listener, listen, milestone, report

QUICK: dict[str, Any] = {"time_limit_s": 1, "cache": False}


class Screen:
    """In the place of rich's status: what the live line showed."""

    def __init__(self, **_: Any) -> None:
        self.seen: list[str] = []

    def status(self, text: str) -> "Screen":
        self.seen.append(text)
        return self

    def update(self, text: str) -> None:
        self.seen.append(text)

    def __enter__(self) -> "Screen":
        return self

    def __exit__(self, *_: object) -> None:
        self.seen.append("gone")


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Screen:
    """A terminal that somebody looks at, outside of pytest."""
    made = Screen()
    monkeypatch.setattr("rich.console.Console", lambda **_: made)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.delenv("PYTEST_VERSION")
    return made


def model_and_input() -> tuple[nn.Module, torch.Tensor]:
    layers = [nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(3)]
    return nn.Sequential(*layers).train(), torch.randn(64, 32)


def test_d1_planning_is_logged_at_info(caplog: pytest.LogCaptureFixture) -> None:
    model, x = model_and_input()
    with caplog.at_level(logging.INFO, logger="rekindle"):
        managed = rekindle.rematerialize(model, x, budget=0.9, **QUICK)
        said = "\n".join(caplog.messages)
        for begin in ("capturing Sequential", "captured ", "measuring ", "profiled ", "searching "):
            assert f"\n{begin}" in f"\n{said}"
        assert f"\nplanned {managed.plan}" in said
        caplog.clear()
        managed(x).square().sum().backward()
        managed(x).square().sum().backward()
    first, second = caplog.messages  # once, before and after the code is made
    assert first.startswith("first planned step: generating its code (")
    assert second.startswith("first planned step: ")


def test_d1_a_live_line_on_a_terminal_and_none_elsewhere(
    screen: Screen, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = model_and_input()
    rekindle.plan(model, x, budget=0.9, **QUICK)
    assert screen.seen[0] == "planning"
    assert screen.seen[1] == "rekindle: capturing Sequential"
    assert any("searching within" in text for text in screen.seen)
    assert screen.seen[-1] == "gone"
    num_seen = len(screen.seen)
    for switch in (
        lambda: monkeypatch.setenv("PYTEST_VERSION", "9"),
        lambda: monkeypatch.setenv("RANK", "1"),
        lambda: monkeypatch.setattr("sys.stderr.isatty", lambda: False),
    ):
        with monkeypatch.context():
            switch()
            rekindle.plan(model, x, budget=0.9, **QUICK)
        monkeypatch.delenv("PYTEST_VERSION", raising=False)
        monkeypatch.delenv("RANK", raising=False)
    assert len(screen.seen) == num_seen


def test_d1_who_listens_already_hears_all_and_shows_it_alone(screen: Screen) -> None:
    heard: list[Progress] = []
    with listen(heard.append), planning_shown():
        milestone("capturing")
    assert [progress.text for progress in heard] == ["capturing"]
    assert screen.seen == []
    assert current_listener() is None


@pytest.mark.parametrize("options", [{"device_profile": "a100"}, {"profile": "estimate"}, {}])
def test_d1_on_progress_is_called(options: dict[str, Any]) -> None:
    model, x = model_and_input()
    seen: list[ProfileProgress] = []
    rekindle.plan(model, x, budget=1.0, on_progress=seen.append, **QUICK, **options)
    assert seen[0].num_done == 0
    assert seen[-1].num_done == seen[-1].num_total > 0


def test_lines_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(planning_progress.time, "monotonic", lambda: now[0])
    said: list[str] = []
    with listen(lines(said.append, planning_progress.STEP, 5.0)):
        for second in range(12):
            now[0] = float(second)
            report(Progress("auto", now[0], cost=2_000_000, bound=1_900_000))
        milestone("planned")
    assert said == [
        "auto 5.0 s, cost 2.00 ms, bound 1.90 ms, gap 5.3 %",
        "auto 10.0 s, cost 2.00 ms, bound 1.90 ms, gap 5.3 %",
        "planned",
    ]


def test_the_command_line_prints_lines_or_shows_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with shown_on_stderr():
        milestone("measuring 3 distinct ops")
    with shown_on_stderr(quiet=True):
        milestone("not said")
    assert capsys.readouterr().err == "measuring 3 distinct ops\n"


def test_the_command_line_has_a_live_line(screen: Screen) -> None:
    with shown_on_stderr():
        milestone("measuring [3] distinct ops")
    assert screen.seen[1] == r"rekindle: measuring [3] distinct ops"
