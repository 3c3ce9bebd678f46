"""The page as a file: small, self-contained, and nothing in it that a name could break."""

import json
import re
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser

from support.report_problems import HOSTILE, layered, measured, solved

from rekindle.core import Op, Problem, Schedule, Value, keep_all
from rekindle.core.generate import random_layered, transformer
from rekindle.report import Facts, account, verdict
from rekindle.report.html import page, write_page
from rekindle.report.timeline import MAX_SAMPLES


def data_of(text):
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    return json.loads(found[1])


class Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags = []
        self.links = []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.links += [v for k, v in attributes if k in ("src", "href", "srcset", "action")]
        assert not [k for k, _ in attributes if k.startswith("on")]


def tags_of(text):
    parser = Tags()
    parser.feed(text)
    return parser


def test_what_it_says_is_the_account():
    found = solved(layered(), 0.6, with_curve=True)
    text = page(found)
    assert verdict(found) in unescape(text)
    data = data_of(text)
    assert data["peak"] == found.trace.peak == max(data["memory"])
    assert data["budget"] == found.facts.budget
    assert data["keepAllPeak"] == found.base.peak == max(data["keepAll"])
    assert tuple(data["memory"]) == found.trace.memory
    assert data["curve"] == [[p.peak, p.cost, p.bound] for p in found.facts.curve]
    for view in data["views"]:
        sums = [sum(column) for column in zip(*view["stacks"], strict=True)]
        for total, memory in zip(sums, data["memory"], strict=True):
            assert abs(total * view["unit"] - memory) <= len(view["bands"]) * view["unit"]


def test_it_needs_nothing_from_anywhere():
    text = page(solved(layered(), 0.6, with_curve=True))
    parser = tags_of(text)
    assert parser.links == ["data:,"]
    assert parser.tags.count("script") == 3
    assert "default-src 'none'" in text
    assert "Leon Sorokin" in text
    assert "Permission is hereby granted" in text


def test_names_are_data():
    found = solved(layered(extra=HOSTILE), 0.6)
    safe = solved(layered(extra="x"), 0.6)
    assert tags_of(page(found)).tags == tags_of(page(safe)).tags
    text = page(found)
    assert "<img" not in text
    assert f"embed{HOSTILE}" in data_of(text)["texts"]
    assert "{{ 7 * 7 }}" in text


def test_twenty_thousand_steps_are_less_than_a_megabyte(tmp_path):
    """Every op that may runs again and again."""
    problem = transformer(500, batch=2, sequence=8, width=64, vocabulary=64)
    again = 1 + 20_000 // len(problem.ops)
    steps = [i for i, op in enumerate(problem.ops) for _ in range(1 if op.once else again)]
    assert len(steps) >= 20_000
    found = account(problem, Schedule(tuple(steps)), Facts(budget=2**30))
    path = write_page(found, tmp_path / "page.html")
    assert path.stat().st_size < 1_000_000
    data = data_of(path.read_text())
    assert len(data["steps"]) <= MAX_SAMPLES + 4
    assert max(data["memory"]) == found.trace.peak


def test_odd_problems_have_pages_too():
    empty = Problem((), (), name="")
    assert "nothing runs" in page(account(empty, keep_all(empty)))
    big = Problem(
        (Value("x", 2**61), Value("y", 2**61)),
        (Op("f", 2**61, (), (0,), workspace=2**61), Op("g", 0, (0,), (1,))),
        outputs=(1,),
        cost_unit="moves",
        size_unit="words",
    )
    assert "words" in page(account(big, keep_all(big)))
    plain = random_layered(200)
    assert "no loss op" in page(account(plain, keep_all(plain)))


def test_measured_and_verified_stand_on_the_page():
    found = solved(layered(), 0.6)
    given = Facts(measured=measured(found), verified="Equal in all.", equal=True)
    text = unescape(page(account(found.problem, found.schedule, given)))
    assert "Equal in all." in text
    assert data_of(page(account(found.problem, found.schedule, given)))["measured"] == (
        found.trace.peak - 12_345
    )
    assert "Not measured." in page(found)


def test_d11_the_device_the_inputs_and_the_call_are_shown():
    found = solved(layered(), 0.6)
    told = {
        "inputs": (("args[0]", "float32 [8, 3, 224, 224]"),),
        "residents": (("parameters", 3 << 30), ("optimizer state (estimated)", 6 << 30)),
        "device": "h100",
        "device_bytes": 80 << 30,
        "commands": ("rekindle plan model.py:make --budget 0.6", "rekindle report plan.json"),
    }
    facts = replace(found.facts, **told)
    text = unescape(page(account(found.problem, found.schedule, facts)))
    assert "args[0]: float32 [8, 3, 224, 224] · for h100" in text
    assert "of the 80.00 GiB of h100." in text
    for part in (
        "parameters",
        "optimizer state (estimated)",
        "this step at its peak",
        "free, also",
    ):
        assert f'title="{part}' in text
    assert "No optimizer was given" not in text
    shown = text.partition("How to reproduce this")[2]
    assert shown.index("rekindle plan model.py:make") < shown.index("rekindle report plan.json")
    facts = replace(facts, residents=(("parameters", 90 << 30),))
    text = page(account(found.problem, found.schedule, facts))
    assert "too much." in text
    assert "No optimizer was given" in text
    assert "The whole device" not in page(found)
