"""One list of options: what takes them by name takes these, with these defaults."""

import dataclasses
import inspect
from typing import Any

import pytest

import rekindle
from rekindle.errors import WishRefused
from rekindle.integrate.adapter_options import BadOption, options_of
from rekindle.plans.options import DEFAULTS, Options
from rekindle.plans.plan_record import KEPT_OPTIONS, kept_options

FIELDS = {f.name: f.default for f in dataclasses.fields(Options)}
OF_A_MODULE = {"on_miss", "max_plans", "dynamic"}  # a plan alone has no calls to miss


def keywords(function: Any) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


def test_signatures_and_fields_agree() -> None:
    of_sample = {"loss_args": None}
    assert keywords(rekindle.rematerialize) == {**FIELDS, **of_sample, "inplace": False}
    of_plan = {k: v for k, v in FIELDS.items() if k not in OF_A_MODULE}
    assert keywords(rekindle.plan) == {**of_plan, **of_sample}
    assert keywords(rekindle.Plan.apply)["on_miss"] == FIELDS["on_miss"]
    assert all(getattr(DEFAULTS, name) == default for name, default in FIELDS.items())


def test_adapters_know_all_options_but_a_loss() -> None:
    given = {name: default for name, default in FIELDS.items() if name != "loss_fn"}
    assert options_of({**given, "budget": 0.5}, "the test") == Options(budget=0.5)
    with pytest.raises(BadOption, match=r"no option 'loss_fn'; it knows budget, .*, max_plans, "):
        options_of({"budget": 0.5, "loss_fn": sum}, "the test")


def test_a_wish_that_is_no_pattern_is_refused_when_it_is_given() -> None:
    with pytest.raises(WishRefused, match="no pattern"):
        Options(save=["blocks", " "])


def test_what_a_plan_file_keeps_of_the_options() -> None:
    given = Options(budget=0.5, seed=3, save="head", recompute=["a", "b"], fuse=False, cache=False)
    kept = kept_options(given, hold_outputs=False)
    assert kept == Options(
        seed=3, save=("head",), recompute=("a", "b"), fuse=False, hold_outputs=False
    )
    assert set(KEPT_OPTIONS) <= FIELDS.keys()
