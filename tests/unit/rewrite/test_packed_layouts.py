"""Where the parts of a tensor lie that attention reads and writes."""

import itertools
import operator
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx

from rekindle.capture.node_facts import NodeFacts, facts, has_facts, set_facts
from rekindle.rewrite import packed_attention
from rekindle.rewrite.graph_edit import GraphEdit
from rekindle.rewrite.packed_attention import (
    lies_packed,
    pack_gradients,
    packed_attention_backward,
    read_in_place,
    read_in_place_backward,
    without_copy,
)
from rekindle.rewrite.redundant_copies import stacked

aten = torch.ops.aten
FORWARD = aten._scaled_dot_product_efficient_attention.default
BACKWARD = aten._scaled_dot_product_efficient_attention_backward.default
BATCH, LENGTH, HEADS, SIZE = 2, 3, 2, 4


@given(st.data())
def test_a_packed_layout_is_found_by_positions(data):
    """Against the positions themselves: part p of the packed tensor holds, at each place of the
    whole, the element that the view of that part shows."""
    sizes = {"b": BATCH, "m": LENGTH, "h": HEADS, "k": SIZE}
    dense = dict(zip("bmhk", (LENGTH * HEADS * SIZE, HEADS * SIZE, SIZE, 1), strict=True))
    order = data.draw(st.permutations("bmhk"))
    dim = data.draw(st.integers(0, 4))
    shape = [sizes[d] for d in order]
    part = torch.empty_strided(shape, [dense[d] for d in order])
    whole = torch.empty([*shape[:dim], 3, *shape[dim:]])
    row = HEADS * SIZE
    positions = torch.arange(BATCH * LENGTH * 3 * row).view(BATCH, LENGTH, 3, row)
    same = True
    for p in range(3):
        place = positions[:, :, p].reshape(-1).as_strided(shape, part.stride())
        mine = torch.arange(whole.numel()).view(whole.shape).select(dim, p)
        same &= torch.equal(mine, place)
    assert lies_packed(part, whole, dim, row) == same


def recorded(parts=(0, 1, 2), *, extra_reader=False, bias=None):
    """A graph of attention's backward and of what stacks its gradients, as captured on a GPU."""
    graph = fx.Graph()
    storages = itertools.count()
    on_gpu = torch._subclasses.FakeTensorMode()

    def described(node, value, like=None):
        storage = next(storages) if like is None else facts(like).storage
        set_facts(node, NodeFacts(value, storage, phase="backward"))
        return node

    with on_gpu:
        dense = torch.empty(BATCH, LENGTH, HEADS, SIZE, device="cuda").transpose(1, 2)
        small = torch.empty((), device="cuda")
        given = [described(graph.placeholder(n), dense) for n in ("g", "q", "k", "v", "out")]
        more = [described(graph.placeholder(n), small) for n in ("lse", "seed", "offset")]
        mask = [True, True, True, False]
        backward = graph.call_function(
            BACKWARD, (*given[:4], bias, given[4], *more, 0.0, mask), {"scale": 0.5}
        )
        set_facts(backward, NodeFacts(phase="backward"))
        views = []
        for k in parts:
            got = described(graph.call_function(operator.getitem, (backward, k)), dense)
            view = graph.call_function(torch.ops.aten.transpose.int, (got, 1, 2))
            views.append(described(view, dense.transpose(1, 2), got))
        whole = described(
            graph.call_function(stacked, (views, 2, False)),
            torch.empty(BATCH, LENGTH, 3, HEADS, SIZE, device="cuda"),
        )
        results = [whole]
        if extra_reader:
            read = graph.call_function(torch.ops.aten.neg.default, (views[0],))
            results.append(described(read, dense))
    edit = GraphEdit(graph, lambda: next(storages), 0, False, tuple(results), forward=())
    return edit, whole


@pytest.fixture
def offered(monkeypatch):
    monkeypatch.setattr(packed_attention, "_works", lambda dtype, device: True)


@pytest.mark.usefixtures("offered")
def test_the_op_takes_the_place_of_both():
    edit, whole = recorded()
    pack_gradients(edit)
    assert whole.target is packed_attention_backward
    names = [getattr(a, "name", a) for a in whole.args]
    assert names[:8] == ["g", "q", "k", "v", "out", "lse", "seed", "offset"]
    assert names[8:] == [0.0, False, 0.5, [BATCH, LENGTH, 3, HEADS, SIZE], False]


@pytest.mark.usefixtures("offered")
@pytest.mark.parametrize(
    "options", [{"parts": (1, 0, 2)}, {"parts": (0, 1)}, {"extra_reader": True}, {"bias": 1}]
)
def test_what_does_not_fit_stays(options):
    edit, whole = recorded(**options)
    pack_gradients(edit)
    assert whole.target is stacked


@pytest.mark.usefixtures("offered")
def test_what_is_written_into_stays():
    edit, whole = recorded()
    nodes = edit.nodes
    writer = whole.graph.call_function(torch.ops.aten.neg_.default, (nodes[1],))
    set_facts(writer, NodeFacts(storage=facts(nodes[1]).storage, writes=(nodes[1],)))
    pack_gradients(edit)
    assert whole.target is stacked


# --- reading ------------------------------------------------------------------------------------


@given(st.data())
def test_a_view_of_a_copy_is_read_without_it(data):
    shape = data.draw(st.lists(st.integers(1, 4), min_size=2, max_size=4))
    order = data.draw(st.permutations(range(len(shape))))
    offset = data.draw(st.integers(0, 3))
    numel = torch.Size(shape).numel()
    source = torch.arange(offset + numel)[offset:].view(shape).permute(order)
    view = source.clone(memory_format=torch.contiguous_format)
    for _ in range(data.draw(st.integers(0, 1))):  # a part of it
        view = view[data.draw(st.integers(0, view.shape[0] - 1))]
    view = view.permute(data.draw(st.permutations(range(view.dim()))))
    found = without_copy(view, source)
    assert found is not None
    stride, at = found
    assert torch.equal(source.as_strided(view.shape, stride, at), view)


def test_a_view_that_repeats_is_not():
    source = torch.arange(12).view(3, 4).t()
    assert without_copy(source.contiguous()[:, :1].expand(4, 3), source) is None
    assert without_copy(source.contiguous()[1:3], source) is None


def with_copy(*, length=SIZE, other_reader=False, given=False):
    """Attention of a projection that is copied first, as in nn.MultiheadAttention, and back."""
    graph = fx.Graph()
    storages = itertools.count()

    def described(node, value, like=None, phase="forward"):
        storage = next(storages) if like is None else facts(like).storage
        set_facts(node, NodeFacts(value, storage, phase=phase))
        return node

    with torch._subclasses.FakeTensorMode():
        made = torch.empty(LENGTH, BATCH, 3, HEADS * length, device="cuda")
        node = graph.placeholder("projection")
        if not given:
            node = graph.call_function(aten.alias.default, (node,))
        projection = described(node, made.permute(2, 0, 1, 3))
        for placeholder in graph.nodes:
            if not has_facts(placeholder):
                set_facts(placeholder, NodeFacts(storage=next(storages)))
        copy = graph.call_function(
            aten.clone.default, (projection,), {"memory_format": torch.contiguous_format}
        )
        dense = torch.empty(made.permute(2, 0, 1, 3).shape, device="cuda")
        whole = facts(described(copy, dense)).value
        views = []
        for k in range(3):
            value = whole.select(0, k).view(LENGTH, BATCH, HEADS, length).permute(1, 2, 0, 3)
            view = graph.call_function(aten.alias.default, (copy,))
            views.append(described(view, value, copy))
        out = described(graph.call_function(FORWARD, (*views, None, True)), whole.select(0, 0))
        if other_reader:
            described(graph.call_function(aten.cat.default, ([views[0]],)), whole.select(0, 0))
        edit = GraphEdit(graph, lambda: next(storages), 0, False)
        read_in_place(edit)
        edit = replace(edit, forward=edit.nodes, num_before=len(graph.nodes))
        back = graph.call_function(BACKWARD, (out, *views, None, out))
        described(back, whole.select(0, 0), phase="backward")
        read_in_place_backward(edit)
    return out, back, copy


def test_attention_reads_the_projection():
    out, back, copy = with_copy()
    row = 3 * HEADS * SIZE
    for k in range(3):
        for view in (out.args[k], back.args[k + 1]):
            assert view.target is aten.as_strided.default
            stride = [row, SIZE, BATCH * row, 1]
            shape = [BATCH, HEADS, LENGTH, SIZE]
            assert list(view.args[1:]) == [shape, stride, k * HEADS * SIZE]
            assert facts(view).storage == facts(copy.args[0]).storage


@pytest.mark.parametrize("options", [{"length": 3}, {"other_reader": True}, {"given": True}])
def test_what_is_not_aligned_read_elsewhere_or_the_caller_s_is_copied(options):
    out, back, copy = with_copy(**options)
    for view in (*out.args[:3], *back.args[1:4]):
        assert view.args[0] is copy
