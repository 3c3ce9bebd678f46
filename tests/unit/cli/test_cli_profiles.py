"""`rekindle cache`, and the options and progress of commands that profile."""

import argparse
import json

import pytest

from rekindle.cli.entry import main
from rekindle.cli.profile_options import add_budget_options, add_profile_options, options_of
from rekindle.plans.options import Options
from rekindle.profile import OpProfile, Source
from rekindle.profile.cache import ProfileCache


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("REKINDLE_CACHE_DIR", str(tmp_path))


def fill():
    op = OpProfile(5, 0, (1,), Source.MEASURED, 5, 5)
    ProfileCache({"device": "Test Chip", "torch": "9.9"}).put([('["a",[],{}]', op)] * 3)


def test_info_and_clear(tmp_path, capsys):
    assert main(["cache", "info"]) == 0
    assert "no cached measurements" in capsys.readouterr().out
    fill()
    assert main(["cache", "info"]) == 0
    out = capsys.readouterr().out
    assert str(tmp_path) in out
    assert "Test Chip" in out
    assert main(["cache", "info", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["num_ops"] == 1
    assert record["environments"][0]["torch"] == "9.9"
    assert main(["cache", "clear", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "num_ops": 1,
        "num_files": 1,
        "num_solutions": 0,
    }
    assert main(["cache", "clear"]) == 0
    assert "0 measurements" in capsys.readouterr().out


def test_a_missing_action_is_bad_usage(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["cache"])
    assert caught.value.code == 2
    assert "info|clear" in capsys.readouterr().err


def parsed(*argv):
    parser = argparse.ArgumentParser()
    add_profile_options(parser)
    add_budget_options(parser)
    return parser.parse_args(argv)


def test_options_become_arguments_of_plan():
    assert options_of(parsed()) == Options(profile="measure")
    assert options_of(parsed("--profile", "estimate")) == Options(profile="estimate")
    assert options_of(parsed("--device-profile", "h200")) == Options(device_profile="h200")
    assert options_of(parsed("--device-budget", "auto", "--optimizer", "adamw")) == Options(
        device_budget="auto", headroom=0.05, optimizer="adamw"
    )
    assert options_of(parsed("--device-budget", "1GiB", "--headroom", "64MiB")) == Options(
        device_budget="1GiB", headroom="64MiB", optimizer=None
    )
    for text, headroom in (("0", 0), ("0.0", 0.0), ("0.1", 0.1), ("-1", "-1"), ("1.5.0", "1.5.0")):
        found = options_of(parsed("--headroom", text)).headroom
        assert (found, type(found)) == (headroom, type(headroom))
    assert options_of(parsed(), on_miss="raise").on_miss == "raise"
