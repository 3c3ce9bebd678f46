"""Copies that only change a layout, made once.

On its way back through attention's packed projection a gradient is copied from one order of its
dimensions into another, and again; gradients of the parts of a tensor are padded with zeros to its
size and added up, or stacked, and then copied into the order that a product wants. Here:

- a copy of a copy reads what the first one copied (`_origin`);
- the parts of a gradient are written once, where they belong, by `rekindle::stacked`, which takes
  the place of the paddings and the sum, or of the stack, and of the copy that follows.

The bits are eager's: a copy changes none, and where padded gradients were added up, each number has
a zero added to it, which turns -0 into 0.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from rekindle.capture.node_facts import NO_STORAGE, facts, set_facts, view_facts
from rekindle.rewrite.graph_edit import GraphEdit
from rekindle.rewrite.layout_algebra import Digit, digits_of, merged, through

aten = torch.ops.aten

# What a rewrite begins with: a copy, or a gradient of a part, padded with zeros.
_ENDS = (aten.clone.default, aten.select_backward.default)
_FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

# --- the op -------------------------------------------------------------------------------------

_library = torch.library.Library("rekindle", "FRAGMENT")
_library.define("stacked(Tensor[] parts, int dim, bool plus_zero) -> Tensor")


def _empty(parts: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    shape = list(parts[0].shape)
    shape.insert(dim, len(parts))
    return parts[0].new_empty(shape)


def _stacked(parts: Sequence[torch.Tensor], dim: int, plus_zero: bool) -> torch.Tensor:
    out = _empty(parts, dim)
    for k, part in enumerate(parts):
        place = out.select(dim, k)
        if plus_zero:
            # As eager's sum of padded parts did: -0 + 0 is 0.
            torch.add(part, 0.0, out=place)
        else:
            place.copy_(part)
    return out


_library.impl("stacked", _stacked, "CompositeExplicitAutograd")
torch.library.register_fake(
    "rekindle::stacked", lambda parts, dim, _plus_zero: _empty(parts, dim), lib=_library
)

stacked = torch.ops.rekindle.stacked.default

# --- rewriting ----------------------------------------------------------------------------------


def shorten_copies(edit: GraphEdit) -> None:
    """Rewrites the copies of a backward; what nobody reads any more is left to be dropped."""
    # Listed before anything changes: views that are made on the way need no look of their own.
    backward = [node for node in edit.backward if facts(node).phase == "backward"]
    if not any(node.target in _ENDS for node in backward):
        return
    copies = _Copies(edit.graph, edit.nodes, edit.results)
    with torch.no_grad():
        for node in backward:
            if is_copy(node):
                copies.shorten(node)
        for node in backward:
            if node.target is aten.add.Tensor:
                copies.join(node)


def is_copy(node: fx.Node) -> bool:
    """Whether the node copies a tensor of a floating dtype into a dense one."""
    if node.target is not aten.clone.default:
        return False
    made, source = facts(node).value, facts(node.args[0]).value
    return bool(
        _dense(made) and made.dtype == source.dtype and made.dtype in _FLOATS and made.numel()
    )


def _dense(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_contiguous() and value.storage_offset() == 0


class _Copies:
    def __init__(
        self, graph: fx.Graph, nodes: Sequence[fx.Node], results: Sequence[fx.Node]
    ) -> None:
        self.graph = graph
        self.made: dict[int, fx.Node] = {}  # storage -> the op of the backward that makes it
        self.readers: dict[int, set[fx.Node]] = {}  # of a storage, views looked through
        # Must stay, or change, or are the caller's, which may lie elsewhere at the next call.
        self.fixed = {facts(node).storage for node in results}
        for node in nodes:
            known = facts(node)
            storage = known.storage
            if node.op == "placeholder":
                self.fixed.add(storage)
            for written in known.writes:
                self.fixed.add(facts(written).storage)
            for argument in node.all_input_nodes:
                below = facts(argument).storage
                if below not in (NO_STORAGE, storage):
                    self.readers.setdefault(below, set()).add(node)
            if storage != NO_STORAGE and known.phase == "backward":
                self.made.setdefault(storage, node)

    def _maker(self, view: fx.Node, reader: fx.Node) -> fx.Node | None:
        """The op that made what the view shows, where only this one reads it."""
        storage = facts(view).storage
        # With another reader the copy would be made all the same, and its source kept longer for
        # this one.
        if storage in self.fixed or self.readers.get(storage) != {reader}:
            return None
        return self.made.get(storage)

    def shorten(self, copy: fx.Node) -> None:
        view = copy.args[0]
        assert isinstance(view, fx.Node)
        if self._join_before(copy, view):
            return
        value = facts(view).value
        found = self._origin(view, copy, tuple(value.shape), digits_of(value.shape, value.stride()))
        if found is not view:
            copy.args = (found,)
            # The source may lie in another order, which a clone would keep: what reads the copy
            # counts on the order that it had.
            copy.kwargs = {"memory_format": torch.contiguous_format}

    def _origin(
        self, view: fx.Node, reader: fx.Node, shape: tuple[int, ...], digits: list[Digit]
    ) -> fx.Node:
        """A tensor of this shape that shows what the digits read of the view's storage: as near to
        where it comes from as can be, through all copies. The digits suffice for the view."""
        stride = merged(digits, len(shape))
        assert stride is not None
        first = reader
        found = (view, stride, facts(view).value.storage_offset())
        # A copy begins at the start of its storage, so a view with an offset shows a part of it.
        while facts(view).value.storage_offset() == 0:
            copy = self._maker(view, reader)
            if copy is None or not is_copy(copy):
                break
            source = copy.args[0]
            assert isinstance(source, fx.Node)
            value = facts(source).value
            below = through(digits, value.shape, value.stride())
            # What changes may have changed since it was copied.
            if below is None or facts(source).storage in self.fixed:
                break
            view, reader, digits = source, copy, below
            stride = merged(digits, len(shape))
            if stride is not None:
                found = (view, stride, value.storage_offset())
        view, stride, offset = found
        value = facts(view).value
        if (tuple(value.shape), value.stride(), value.storage_offset()) == (shape, stride, offset):
            return view
        with self.graph.inserting_before(first):
            node = self.graph.call_function(
                aten.as_strided.default, (view, list(shape), list(stride), offset)
            )
        shown = value.as_strided(shape, stride, offset)
        set_facts(node, view_facts(facts(first), facts(view), shown))
        return node

    # ---- parts of a tensor

    def _join_before(self, copy: fx.Node, view: fx.Node) -> bool:
        """Where the copy is of a stack, or of padded parts that are added up: the parts are written
        into the copy's layout."""
        whole = self._maker(view, copy)
        if whole is None or not _dense(facts(whole).value):
            return False
        parts = self._parts(whole)
        if parts is None:
            return False
        shown, value = facts(view).value, facts(whole).value
        dim, plus_zero, tensors = parts
        num, step = value.shape[dim], value.stride(dim)
        pairs = list(zip(shown.shape, shown.stride(), strict=True))
        at = [i for i, pair in enumerate(pairs) if pair == (num, step)]
        if num == 1 or len(at) != 1 or shown.storage_offset():
            return False
        # Without that dimension, what lies above it moves together.
        rest = [(n, s) for i, (n, s) in enumerate(pairs) if i != at[0]]
        shape = tuple(n for n, _ in rest)
        stride = tuple(s // num if s > step else s for _, s in rest)
        if not self._write(copy, tensors, at[0], plus_zero, shape, stride):
            return False
        self.fixed.add(facts(whole).storage)  # nobody reads it any more
        return True

    def join(self, whole: fx.Node) -> None:
        """Padded parts that are added up, and read as they are."""
        storage = facts(whole).storage
        if storage in self.fixed or not self.readers.get(storage) or not _dense(facts(whole).value):
            return
        parts = self._parts(whole)
        if parts is not None:
            dim, plus_zero, tensors = parts
            shape = tuple(facts(tensors[0][0]).value.shape)
            stride = torch.empty(shape, device="meta").stride()
            self._write(whole, tensors, dim, plus_zero, shape, stride)

    def _write(
        self,
        node: fx.Node,
        tensors: Sequence[tuple[fx.Node, fx.Node]],
        dim: int,
        plus_zero: bool,
        shape: tuple[int, ...],
        stride: tuple[int, ...],
    ) -> bool:
        """Turns the node into the op that writes the parts, each read with this shape and stride as
        if it were dense."""
        digits = []
        for part, _ in tensors:
            value = facts(part).value
            # All parts are looked at before anything is written: one that does not fit keeps
            # eager's ops for all.
            found = through(digits_of(shape, stride), value.shape, value.stride())
            if found is None or merged(found, len(shape)) is None:
                return False
            if facts(part).storage in self.fixed:
                return False
            digits.append(found)
        views = [
            self._origin(part, reader, shape, found)
            for (part, reader), found in zip(tensors, digits, strict=True)
        ]
        node.target, node.args, node.kwargs = stacked, (views, dim, plus_zero), {}
        return True

    def _parts(self, whole: fx.Node) -> tuple[int, bool, list[tuple[fx.Node, fx.Node]]] | None:
        """The dimension, whether zeros are added, and each part with the op that reads it."""
        value = facts(whole).value
        if value.dtype not in _FLOATS:
            return None
        if whole.target is aten.stack.default:
            tensors = whole.args[0]
            dim = whole.args[1] if len(whole.args) > 1 else 0
            if any(facts(t).value.dtype != value.dtype for t in tensors):
                return None
            return dim % value.dim(), False, [(t, whole) for t in tensors]
        if whole.target is not aten.add.Tensor:
            return None
        padded = self._summands(whole)
        if padded is None:
            return None
        # Padded along one dimension, one part for each index of it: else zeros would be missing.
        dims = {node.args[2] % value.dim() for node in padded}
        if len(dims) != 1:
            return None
        dim = dims.pop()
        by_index = {node.args[3] % value.shape[dim]: node for node in padded}
        if len(by_index) != len(padded) or len(by_index) != value.shape[dim]:
            return None
        return dim, True, [(by_index[k].args[0], by_index[k]) for k in range(len(by_index))]

    def _summands(self, node: fx.Node) -> list[fx.Node] | None:
        """Of a sum of padded parts, at least two, of which nobody else reads anything."""
        found: list[fx.Node] = []
        # Down through the sums, however they are nested: autograd adds two at a time.
        stack = [node]
        while stack:
            now = stack.pop()
            if facts(now).value.shape != facts(node).value.shape:
                return None
            if facts(now).value.dtype != facts(node).value.dtype:
                return None
            if now.target is aten.select_backward.default and now is not node:
                found.append(now)
                continue
            if now.target is not aten.add.Tensor or now.kwargs or len(now.args) != 2:
                return None
            for argument in now.args:
                if not isinstance(argument, fx.Node) or self._maker(argument, now) is not argument:
                    return None
                stack.append(argument)
        return found
