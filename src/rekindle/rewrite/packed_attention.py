"""Attention's queries, keys and values are read, and their gradients written, where they belong.

The three come from one projection mostly. Where they are copied out of it for attention alone, as
nn.MultiheadAttention does, memory-efficient attention reads them where they are (`read_in_place`).
On the way back their gradients are copied into one tensor, of which the projection's backward
reads. Attention's backward can write them into parts of one tensor itself:
`rekindle::packed_attention_backward` asks for that, in the place of the op and of the
`rekindle::stacked` that copies its results (`pack_gradients`).

The bits are eager's: the same kernels read and write with other strides. Where `stacked` adds a
zero, it is added in place.
"""

import math
import operator
from collections.abc import Container, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from rekindle.capture.node_facts import NO_STORAGE, facts, set_facts, view_facts
from rekindle.rewrite.exactness import same_numbers, tried_once
from rekindle.rewrite.graph_edit import GraphEdit
from rekindle.rewrite.layout_algebra import digits_of, merged, through
from rekindle.rewrite.redundant_copies import is_copy, stacked

aten = torch.ops.aten

_FORWARD = aten._scaled_dot_product_efficient_attention.default
_BACKWARD = aten._scaled_dot_product_efficient_attention_backward.default
_MOST_BATCHES = (1 << 16) - 1  # more are worked through in parts
_CAUSAL, _NO_MASK = 1, 0  # torch's numbers for kinds of masks

_library = torch.library.Library("rekindle", "FRAGMENT")
_library.define(
    "packed_attention_backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out,"
    " Tensor logsumexp, Tensor seed, Tensor offset, float dropout_p, bool is_causal, float? scale,"
    " int[] shape, bool plus_zero) -> Tensor"
)


def _packed(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    seed: torch.Tensor,
    offset: torch.Tensor,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    shape: Sequence[int],
    plus_zero: bool,
) -> torch.Tensor:
    # The private op counts heads after positions, the public one before.
    grad_out, query, key, value, out = (
        t.transpose(1, 2) for t in (grad_out, query, key, value, out)
    )
    mask = _CAUSAL if is_causal else _NO_MASK
    first = aten._efficient_attention_backward.default(
        grad_out, query, key, value, None, out, None, None, 0, 0, logsumexp, dropout_p,
        seed, offset, mask, False, scale=scale, shared_storage_dqdkdv=True,
    )[0]  # fmt: skip
    # `shared_storage_dqdkdv` makes the three as parts of one tensor, the first at its beginning.
    stride = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    packed = first.as_strided(shape, stride, first.storage_offset())
    return packed.add_(0.0) if plus_zero else packed


_library.impl("packed_attention_backward", _packed, "CompositeExplicitAutograd")
torch.library.register_fake(
    "rekindle::packed_attention_backward",
    lambda grad_out, *rest: grad_out.new_empty(rest[-2]),
    lib=_library,
)

packed_attention_backward = torch.ops.rekindle.packed_attention_backward.default


# --- layouts ------------------------------------------------------------------------------------


def lies_packed(part: torch.Tensor, whole: torch.Tensor, dim: int, row: int) -> bool:
    """Whether the whole is where the parts, of which this is the layout of each, belong: rows of
    `row` elements, of each part one in turn."""
    num = whole.shape[dim]
    if part.storage_offset() or whole.stride(dim) != row:
        return False
    strides = [s for d, s in enumerate(whole.stride()) if d != dim]
    return all(
        n == 1 or (packed == num * s if s % row == 0 else packed == s and n * s <= row)
        for n, s, packed in zip(part.shape, part.stride(), strides, strict=True)
    )


def without_copy(view: torch.Tensor, copied: torch.Tensor) -> tuple[tuple[int, ...], int] | None:
    """The tensor was copied densely, and the view reads the copy, or one of its parts, every
    element once: stride and offset that read the same of what was copied."""
    shape, stride, offset = list(copied.shape), list(copied.stride()), copied.storage_offset()
    left = view.storage_offset()
    while shape and view.numel() < math.prod(shape):
        index, left = divmod(left, math.prod(shape[1:]))
        offset += index * stride[0]
        shape, stride = shape[1:], stride[1:]
    if left or view.numel() != math.prod(shape):
        return None
    digits = through(digits_of(view.shape, view.stride()), shape, stride)
    found = None if digits is None else merged(digits, view.dim())
    return None if found is None else (found, offset)


# --- reading ------------------------------------------------------------------------------------

_READS = {_FORWARD: (0, 1, 2), _BACKWARD: (1, 2, 3)}  # queries, keys and values
_ALIGNED = 16  # bytes; of less, another kernel might be chosen


def read_in_place(edit: GraphEdit) -> None:
    """In a forward: what is copied for attention alone is read where it is. The copy is left to be
    dropped."""
    graph = edit.graph
    copies = {facts(n).storage: n for n in graph.nodes if is_copy(n)}
    if not copies:
        return
    # Not what changes, and not the caller's, which may lie elsewhere at the next call.
    kept = {facts(w).storage for n in graph.nodes for w in facts(n).writes}
    kept |= {facts(n).storage for n in graph.nodes if n.op == "placeholder"}
    # All readers or none: with one that needs the copy, it is made anyway.
    for storage, readers in _reads(graph.nodes, copies).items():
        source = copies[storage].args[0]
        assert isinstance(source, fx.Node)
        if any(p not in _READS.get(n.target, ()) for n, p in readers):
            continue
        if not facts(source).value.is_cuda or kept & {storage, facts(source).storage}:
            continue
        if all(_layout(n, p, source) is not None for n, p in readers):
            copy = copies[storage]
            set_facts(copy, replace(facts(copy), read_in_place=True))
            for node, position in readers:
                _read_there(graph, node, position, source)


def read_in_place_backward(edit: GraphEdit) -> None:
    """The same in that forward's backward."""
    graph = edit.graph
    copies = {facts(n).storage: n for n in graph.nodes if facts(n).read_in_place}
    if not copies:
        return
    for storage, readers in _reads(edit.backward, copies).items():
        source = copies[storage].args[0]
        assert isinstance(source, fx.Node)
        for node, position in readers:
            if position in _READS.get(node.target, ()) and _layout(node, position, source):
                _read_there(graph, node, position, source)


def _reads(
    nodes: Iterable[fx.Node], copies: Container[int]
) -> dict[int, list[tuple[fx.Node, int]]]:
    """Of each of these copies, views looked through: who reads it, as which argument (-1: as part
    of one)."""
    found: dict[int, list[tuple[fx.Node, int]]] = {}
    for node in nodes:
        for argument in node.all_input_nodes:
            storage = facts(argument).storage
            if storage in copies and storage != facts(node).storage:
                positions = [k for k, a in enumerate(node.args) if a is argument] or [-1]
                found.setdefault(storage, []).extend((node, k) for k in positions)
    return found


def _layout(node: fx.Node, position: int, source: fx.Node) -> tuple[tuple[int, ...], int] | None:
    """Stride and offset of the argument where it was copied from."""
    view: Any = node.args[position]
    layout = without_copy(facts(view).value, facts(source).value)
    if layout is None:
        return None
    stride, offset = layout
    # torch picks the kernel by how queries, keys and values are aligned: one that was aligned as a
    # copy must be so where it is read, or other bits may come out.
    size = facts(source).value.element_size()
    aligned = all(s * size % _ALIGNED == 0 for s in (*stride[:-1], offset))
    return layout if stride[-1] == 1 and aligned else None


def _read_there(graph: fx.Graph, node: fx.Node, position: int, source: fx.Node) -> None:
    layout = _layout(node, position, source)
    assert layout is not None
    stride, offset = layout
    read: Any = node.args[position]
    shape = facts(read).value.shape
    with graph.inserting_before(node), torch.no_grad():
        view = graph.call_function(
            aten.as_strided.default, (source, list(shape), list(stride), offset)
        )
        value = facts(source).value.as_strided(shape, stride, offset)
    set_facts(view, view_facts(facts(node), facts(source), value))
    node.update_arg(position, view)


# --- writing ------------------------------------------------------------------------------------


def pack_gradients(edit: GraphEdit) -> None:
    """Joins attention's backward with the op that stacks its gradients, where nobody else reads
    them."""
    nodes = edit.nodes
    candidates = [node for node in nodes if node.target is stacked]
    if not candidates:
        return
    readers, written = _readers(nodes, edit.results)
    for node in candidates:
        backward = _attention_of(node, readers)
        if backward is not None and _fits(backward, node, written):
            grad_out, query, key, value, _, out, *rest = backward.args
            logsumexp, seed, offset, dropout_p, _, *causal = rest
            scale = backward.kwargs.get("scale")
            shape, plus_zero = list(facts(node).value.shape), node.args[2]
            node.target = packed_attention_backward
            node.args = (
                grad_out, query, key, value, out, logsumexp, seed, offset, dropout_p,
                bool(causal and causal[0]), scale, shape, plus_zero,
            )  # fmt: skip


def _readers(
    nodes: Iterable[fx.Node], results: Sequence[fx.Node]
) -> tuple[dict[int, set[fx.Node]], set[int]]:
    """Of each storage, who reads it, of all that is not dropped; and the storages that ops write
    into."""
    writers = [node for node in nodes if facts(node).writes]
    written = {facts(w).storage for node in writers for w in facts(node).writes}
    readers: dict[int, set[fx.Node]] = {facts(r).storage: {r} for r in results}
    # From what is given away or written, downwards: what is dropped later reads nothing.
    stack, seen = [*results, *writers], {*results, *writers}
    while stack:
        node = stack.pop()
        for argument in node.all_input_nodes:
            storage = facts(argument).storage
            if storage not in (NO_STORAGE, facts(node).storage):
                readers.setdefault(storage, set()).add(node)
            if argument not in seen:
                seen.add(argument)
                stack.append(argument)
    return readers, written


def _attention_of(node: fx.Node, readers: dict[int, set[fx.Node]]) -> fx.Node | None:
    """The backward of which this stacks all three gradients, in their order, alone."""
    parts: Any = node.args[0]
    roots = [_root(part) for part in parts]
    # Query, key and value, as attention's backward gives them.
    if len(parts) != 3 or any(r.target is not operator.getitem for r in roots):
        return None
    if [r.args[1] for r in roots] != [0, 1, 2] or len({r.args[0] for r in roots}) != 1:
        return None
    backward = roots[0].args[0]
    assert isinstance(backward, fx.Node)
    if backward.target is not _BACKWARD:
        return None
    if any(readers.get(facts(r).storage) != {node} for r in roots):
        return None
    return backward


def _root(view: fx.Node) -> fx.Node:
    """What the view shows."""
    while view.target is not operator.getitem and view.args:
        below = view.args[0]
        if not isinstance(below, fx.Node):
            return view
        if facts(below).storage != facts(view).storage:
            return view
        view = below
    return view


def _fits(backward: fx.Node, node: fx.Node, written: set[int]) -> bool:
    grad_out, query, key, value, bias, _out, *rest = backward.args
    assert isinstance(query, fx.Node)
    q = facts(query).value
    batch, heads, _, size = q.shape
    parts: Any = node.args[0]
    whole = facts(node).value
    return (
        bias is None
        and list(rest[4])[:3] == [True, True, True]
        and q.is_cuda
        and all(facts(t).value.shape == q.shape for t in (grad_out, key, value))
        and batch <= _MOST_BATCHES
        # The joined op runs where the stack stood, later than the backward did: what it reads must
        # be the same there.
        and not written & {facts(n).storage for n in backward.all_input_nodes}
        and all(facts(p).value.numel() == q.numel() for p in parts)
        and all(lies_packed(facts(p).value, whole, node.args[1], heads * size) for p in parts)
        and whole.is_contiguous()
        and _works(q.dtype, q.device)
    )


@tried_once
def _works(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether torch offers it as it is asked for here, with the numbers of the separate op: plain,
    with a causal mask, and with dropout, whose mask follows from the seed and offset given."""
    generator = torch.Generator(device).manual_seed(0)
    numbers = torch.randn(2, 40, 4, 2, 32, generator=generator, device=device).to(dtype)
    qkv, upstream = numbers[:, :, :3].contiguous(), numbers[:, :, 3].transpose(1, 2).contiguous()
    with torch.random.fork_rng([device]):  # dropout draws
        query, key, value = (t.transpose(1, 2) for t in qkv.unbind(2))
        for p, causal in ((0.0, False), (0.0, True), (0.25, False)):
            try:
                out, *rest = aten._scaled_dot_product_efficient_attention.default(
                    query, key, value, None, True, p, causal
                )
                given = (upstream, query, key, value)
                separate = _BACKWARD(*given, None, out, *rest, p, [True, True, True, False], causal)
                shape = (2, 40, 3, 64)
                ours = packed_attention_backward(*given, out, *rest, p, causal, None, shape, False)
            except TypeError:  # a release whose op takes other arguments
                return False
            theirs = torch.stack([g.transpose(1, 2).reshape(2, 40, 64) for g in separate[:3]], 2)
            if not same_numbers([ours], [theirs]):
                return False
    return True
