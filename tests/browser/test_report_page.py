"""The report page in a real browser: it draws, its numbers are the plan's, it answers to the
pointer and to clicks, it fits a phone, and it asks nobody for anything."""

import os
import re
import shutil
from pathlib import Path

import pytest
from support.report_problems import HOSTILE, layered, measured, solved

from rekindle.core import keep_all
from rekindle.report import Facts, account, verdict
from rekindle.report.format import size
from rekindle.report.html import write_page

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
QUIET = (
    "--no-sandbox",  # the tests of a container run as root
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
DESKTOP = {"viewport": {"width": 1280, "height": 900}}
PHONE = {"viewport": {"width": 360, "height": 740}, "has_touch": True, "is_mobile": True}


def missing(what):
    """Where the browser is required (`.ci/run`), its absence is no reason to pass."""
    if os.environ.get("REKINDLE_BROWSER_TESTS") == "required":
        pytest.fail(f"the report page cannot be tested: {what}")
    pytest.skip(f"THE REPORT PAGE IS NOT TESTED: {what}")


@pytest.fixture(scope="module")
def browser():
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        missing("playwright is not installed")
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        missing(f"none of {', '.join(BROWSERS)} is on the PATH; `make browser` installs one")
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=path, args=list(QUIET))
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def plan():
    found = solved(layered(), 0.6, with_curve=True)
    facts = found.facts
    return account(
        found.problem,
        found.schedule,
        Facts(
            budget=facts.budget,
            bound=facts.bound,
            solver=facts.solver,
            curve=facts.curve,
            measured=measured(found),
        ),
    )


class Opened:
    """A page in a browser, and whatever went wrong or out while it was open."""

    def __init__(self, browser, path, **options):
        self.context = browser.new_context(**options)
        self.page = self.context.new_page()
        self.errors: list[str] = []
        self.requests: list[str] = []
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on(
            "console", lambda said: self.errors.append(said.text) if said.type == "error" else None
        )
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(Path(path).as_uri())

    def text(self, selector):
        return self.page.inner_text(selector)

    def pixels(self):
        """The chart as the browser holds it."""
        return self.page.evaluate("document.querySelector('#chart canvas').toDataURL()")

    def fits(self):
        return self.page.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.fixture
def opened(browser, plan, tmp_path):
    found = []

    def open_(told=plan, **options):
        found.append(Opened(browser, write_page(told, tmp_path / "p.html"), **(options or DESKTOP)))
        return found[-1]

    yield open_
    for one in found:
        assert one.errors == []
        # The page itself and pictures inside it: no request leaves the machine.
        assert [url for url in one.requests if not url.startswith(("file:", "data:"))] == []
        assert len([url for url in one.requests if url.startswith("file:")]) == 1
        one.context.close()


def test_it_draws_and_says_what_the_plan_says(opened, plan):
    page = opened()
    assert page.text("#verdict").endswith(f"{verdict(plan)}.")
    assert size(plan.problem, plan.trace.peak) in page.text(".tiles")
    colours = page.page.evaluate(
        """() => { const c = document.querySelector('#chart canvas');
        const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;
        const seen = new Set();
        for (let i = 0; i < d.length; i += 4) seen.add(`${d[i]},${d[i + 1]},${d[i + 2]}`);
        return [...seen]; }"""
    )
    # Okabe and Ito's blue, orange and green are in the stack; vermillion in the lane of reruns.
    assert {"0,114,178", "230,159,0", "0,158,115", "213,94,0"} <= set(colours)
    assert page.page.locator("#curve circle").count() == len(plan.facts.curve)
    rows = page.page.locator("#modules tbody tr").all_inner_texts()
    assert any("layers" in row for row in rows)
    assert size(plan.problem, sum(plan.saved)) in page.text("#modules tbody tr:first-child")


def test_the_readout_is_the_peak_until_the_pointer_comes(opened, plan):
    page = opened()
    step, peak = plan.trace.peak_step, size(plan.problem, plan.trace.peak)
    assert page.text("#readout").startswith(f"Step {step} of {len(plan.schedule)}: {peak}")
    bands = page.page.locator("#bands output").all_inner_texts()
    assert len(bands) > 2
    assert all(re.fullmatch(r"[\d.]+ [KMG]?i?B", text) for text in bands)


def test_hovering_tells_each_step(opened, plan):
    page = opened()
    over = page.page.locator("#chart .u-over")
    box = over.bounding_box()
    for share in (0.1, 0.5, 0.9):
        page.page.mouse.move(box["x"] + share * box["width"], box["y"] + box["height"] / 3)
        step = int(share * len(plan.schedule))
        told = page.text("#readout")
        found = int(re.match(r"Step (\d+) of", told)[1])
        assert abs(found - step) <= 1
        assert size(plan.problem, plan.trace.memory[found]) in told
        assert plan.places[plan.schedule.ops[found]].call in told
        assert plan.places[plan.schedule.ops[found]].module in told
    page.page.mouse.move(5, 5)
    assert f"Step {plan.trace.peak_step} of" in page.text("#readout")


def test_arrow_keys_move_through_the_steps(opened, plan):
    page = opened()
    page.page.focus("#chart")
    page.page.keyboard.press("ArrowRight")
    assert page.text("#readout").startswith(f"Step {plan.trace.peak_step + 1} of")


def test_bands_and_lines_can_be_hidden(opened):
    page = opened()
    before = page.pixels()
    first = page.page.locator("#bands button").first
    first.click()
    assert first.get_attribute("aria-pressed") == "false"
    without = page.pixels()
    assert without != before
    first.click()
    assert page.pixels() == before
    for line in ("budget", "keepAll", "measured"):
        button = page.page.locator(f"[data-line={line}]")
        button.click()
        assert button.get_attribute("aria-pressed") == "false"
        assert page.pixels() != before
        button.click()
    assert page.pixels() == before


def test_views_and_axes(opened, plan):
    page = opened()
    by_layer = page.page.locator("#bands button").all_inner_texts()
    page.page.click("[data-view='2']")
    kinds = " ".join(page.page.locator("#bands button").all_inner_texts())
    assert "saved for the backward" in kinds
    assert "recomputed" in kinds
    page.page.click("[data-view='1']")
    assert any("layers.*" in t for t in page.page.locator("#bands button").all_inner_texts())
    page.page.click("[data-view='0']")
    assert page.page.locator("#bands button").all_inner_texts() == by_layer
    steps = page.pixels()
    page.page.click("[data-axis=time]")
    assert page.pixels() != steps
    assert f"Step {plan.trace.peak_step} of" in page.text("#readout")


def test_zoom_and_back(opened):
    page = opened()
    whole = page.pixels()
    assert page.page.locator("#reset").is_hidden()
    box = page.page.locator("#chart .u-over").bounding_box()
    page.page.mouse.move(box["x"] + 100, box["y"] + 50)
    page.page.mouse.down()
    page.page.mouse.move(box["x"] + 300, box["y"] + 60, steps=4)
    page.page.mouse.up()
    assert page.pixels() != whole
    page.page.click("#reset")
    assert page.page.locator("#reset").is_hidden()
    assert page.pixels() == whole


def test_points_of_the_curve_tell_what_they_cost(opened, plan):
    page = opened()
    assert "This is the plan" in page.text("#point")
    for k, point in enumerate(plan.facts.curve):
        page.page.locator("#curve circle").nth(k).focus()
        told = page.text("#point")
        assert told.startswith(size(plan.problem, point.peak))
        assert f"{100 * (point.cost / plan.base.cost - 1):+.1f} % time" in told


def test_modules_fold_and_sort(opened):
    page = opened()
    rows = page.page.locator("#modules tbody tr")
    shown = lambda: [r for r in rows.all() if r.is_visible()]  # noqa: E731
    number = len(shown())
    top = page.page.locator("#modules .fold").first
    top.click()
    assert len(shown()) == 1
    top.click()
    assert len(shown()) == number
    page.page.click("[data-sort=extra]")
    extras = [int(r.get_attribute("data-extra")) for r in rows.all()
              if r.get_attribute("data-depth") == "1"]  # fmt: skip
    assert extras == sorted(extras, reverse=True)
    page.page.click("[data-sort=order]")
    order = [int(r.get_attribute("data-id")) for r in rows.all()]
    assert order == sorted(order)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_shows_it_without_scrolling_sideways(opened, plan, scheme):
    page = opened(**PHONE, color_scheme=scheme)
    assert page.fits()
    page.page.tap("#chart .u-over", position={"x": 60, "y": 60})
    assert "Step" in page.text("#readout")
    assert page.fits()
    assert "hidden" not in page.page.evaluate("getComputedStyle(document.body).overflowX")
    small = page.page.locator("#modules tbody tr:visible").count()
    assert 0 < small <= plan.trace.num_recomputed + 20


def test_it_follows_the_window_and_its_colours(opened):
    page = opened()
    light = page.pixels()
    drawn = "document.querySelector('#chart canvas').toDataURL()"
    page.page.emulate_media(color_scheme="dark")
    page.page.wait_for_function(f"before => {drawn} !== before", arg=light)
    page.page.emulate_media(color_scheme="light")
    page.page.wait_for_function(f"before => {drawn} === before", arg=light)
    page.page.set_viewport_size({"width": 700, "height": 900})
    page.page.wait_for_function("document.querySelector('#chart canvas').clientWidth < 700")
    assert page.fits()


def test_a_budget_far_above_everything_starts_hidden(opened):
    problem = layered()
    page = opened(account(problem, keep_all(problem), Facts(budget=2**40)))
    assert page.page.get_attribute("[data-line=budget]", "aria-pressed") == "false"
    assert page.page.get_attribute("[data-line=keepAll]", "aria-pressed") == "true"


def test_long_and_hostile_names_break_nothing(opened):
    hostile = solved(layered(extra=HOSTILE + ".x" * 60), 0.6)
    for options in (DESKTOP, PHONE):
        page = opened(hostile, **options)
        assert page.fits()
        assert page.page.title() == "Net: memory plan"
        assert page.page.locator("img").count() == 0


def test_a_plan_that_does_not_fit_says_so(opened):
    problem = layered()
    page = opened(account(problem, keep_all(problem), Facts(budget=2**20)))
    assert "Does not fit 1.00 MiB" in page.text("#verdict")
    assert page.page.locator("#verdict.over").count() == 1
    assert page.page.locator("#curve").count() == 0


def test_nothing_at_all_is_a_page_too(opened):
    from rekindle.core import Problem

    page = opened(account(Problem((), ()), keep_all(Problem((), ()))))
    assert "nothing runs" in page.text("#alive")


def test_d11_the_axis_of_memory_has_enough_ticks(browser, plan, tmp_path):
    path = tmp_path / "page.html"
    write_page(plan, path)
    context = browser.new_context(**DESKTOP)
    page = context.new_page()
    page.add_init_script(
        """window.written = new Set(); const own = CanvasRenderingContext2D.prototype;
        const draw = own.fillText;
        own.fillText = function (t, ...at) {
            window.written.add(t); return draw.call(this, t, ...at); };"""
    )
    page.goto(path.as_uri())
    written = page.evaluate("[...window.written]")
    ticks = [text for text in written if re.fullmatch(r"[\d.]+ [KMG]?i?B", text)]
    context.close()
    assert 4 <= len(ticks) <= 8, written
