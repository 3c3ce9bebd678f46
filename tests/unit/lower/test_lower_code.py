"""The Python that lowered graphs become: what it runs, and when what it reads dies."""

import linecache
import math
import traceback
import weakref

import pytest
import torch
from torch import fx
from torch.fx.graph_module import _loader

from rekindle.lower.codegen import compile_boxed


class Thing:
    """Something whose death can be seen."""


def graph_of(build):
    graph = fx.Graph()
    graph.output(build(graph))
    return graph


def test_arguments_die_after_their_last_use():
    refs = []

    def alive(*_):
        return [ref() is not None for ref in refs]

    def build(graph):
        a, b, _ = (graph.placeholder(name) for name in "abc")
        first = graph.call_function(alive, (a,))  # c is read by nobody
        second = graph.call_function(alive, (b,))
        return [first, second, graph.call_function(alive, ())]

    run, source = compile_boxed(graph_of(build))
    given = [Thing(), Thing(), Thing()]
    refs += [weakref.ref(thing) for thing in given]
    found = run(given)
    assert given == []
    assert found == [[True, True, False], [False, True, False], [False, False, False]]
    assert "del c" in source


def test_results_die_after_their_last_use():
    refs = []

    def make():
        thing = Thing()
        refs.append(weakref.ref(thing))
        return thing

    def alive(*_):
        return [ref() is not None for ref in refs]

    def build(graph):
        a = graph.call_function(make, ())
        graph.call_function(make, ())  # nobody asks for this one
        before = graph.call_function(alive, (a,))
        return (before, graph.call_function(alive, ()))

    run, _ = compile_boxed(graph_of(build))
    assert run([]) == ([True, False], [False, False])


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, -3, 1.5, -0.0, math.inf, -math.inf, 1e300, 2j, 'it\'s "so"\n', ...),
        *(torch.float32, torch.device("cpu"), torch.strided, torch.contiguous_format),
        *([1, [2.0, None]], (1,), (), [], {"a": [torch.int64]}, slice(1, None, 2)),
    ],
    ids=repr,
)
def test_constants_arrive_as_they_are(value):
    found = []
    graph = graph_of(
        lambda g: g.call_function(lambda x, *, y: found.append((x, y)), (value,), {"y": value})
    )
    compile_boxed(graph)[0]([])
    for got in found[0]:
        assert got == value
        assert math.copysign(1, got) == math.copysign(1, value) if value == 0.0 else True
        assert isinstance(got, type(value)) or isinstance(value, (list, dict))


def test_not_a_number_arrives():
    graph = graph_of(lambda g: g.call_function(max, ([float("nan")],)))
    assert math.isnan(compile_boxed(graph)[0]([]))


def test_names_do_not_collide():
    """Functions of one name, a placeholder of that name, and names that Python keeps for itself."""

    def twice(x):
        return 2 * x

    def other(x):
        return 10 * x

    other.__name__ = "twice"

    def third(x):
        return x + 1

    third.__name__ = "lambda"

    def build(graph):
        x = graph.placeholder("twice")
        return graph.call_function(
            third, (graph.call_function(other, (graph.call_function(twice, (x,)),)),)
        )

    run, _ = compile_boxed(graph_of(build))
    assert run([3]) == 61


def test_methods_and_keywords():
    def build(graph):
        x = graph.placeholder("x")
        return [graph.call_method("sum", (x, [0]), {"keepdim": True}), x]

    run, _ = compile_boxed(graph_of(build))
    x = torch.ones(2, 3)
    total, same = run([x])
    assert total.shape == (1, 3)
    assert same is x


def test_an_error_shows_the_line_and_nothing_is_kept():
    def fail(_):
        raise ZeroDivisionError

    def build(graph):
        return graph.call_function(fail, (graph.placeholder("x"),))

    kept = len(_loader.eval_cache), len(linecache.cache)
    run, _ = compile_boxed(graph_of(build))
    assert (len(_loader.eval_cache), len(linecache.cache)) == kept
    try:
        run([1])
    except ZeroDivisionError as error:
        text = "".join(traceback.format_exception(error))
    assert "fail = fail_1(x)" in text
    gone = weakref.ref(run)
    del run
    assert gone() is None
