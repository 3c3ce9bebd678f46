"""Chains of elementwise ops as one kernel each, where that is exact.

Eager runs an activation such as GPT-2's as eight kernels and keeps what each of them makes; a norm
in higher precision keeps two wide copies. Here a value that only elementwise ops read is not made
at all: whoever needs it computes it from what the chain began with, in registers. The forward
writes what a product or a sum reads, the backward reads what the chain read.

Exact means bitwise identical: every step of a kernel rounds as the op it stands for does, nothing
is reordered, and a kernel is used only if it gave what the separate ops give, bit by bit, on random
and on special numbers, on the device where it will run. What does not is left as it is.

- `_elementwise`: the ops that can take part, and of which layouts.
- `_Regions`: which values are made, and from what each of them is computed. An expression ends at
  what other ops make or read; at a written storage; at an argument, where only the forward read it
  (the caller may change it before the backward); and where it would keep more alive than it frees.
- `kernels.elementwise`: one expression, as the ops that it stands for and as CUDA source.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from rekindle.capture.node_facts import facts
from rekindle.rewrite.exactness import same_bits
from rekindle.rewrite.graph_edit import GraphEdit
from rekindle.rewrite.kernels.elementwise import SOURCE, TYPES, Kernel, Place, Step, place_of
from rekindle.rewrite.split_norm_dropout import APPLY, put_back
from rekindle.torch_compat import CudaKernel, named_call

aten = torch.ops.aten

_TRIED = 1 << 20  # elements of a kernel's result that are compared before it is used
_MAX_STEPS = 32
_MAX_WIDE = 5  # operands of full size
_DTYPES = (torch.float32, torch.bfloat16)
_VIEWS = (aten.view.default, aten._unsafe_view.default, aten.detach.default)


# --- which ops take part ------------------------------------------------------------------------


def _elementwise(node: fx.Node, smallest: int) -> bool:
    if node.op != "call_function" or node.target not in SOURCE or facts(node).writes:
        return False
    out = facts(node).value
    if not isinstance(out, torch.Tensor) or _order(out) is None or out.dim() == 0:
        return False
    if out.dtype not in _DTYPES or out.numel() < smallest:
        return False
    if node.kwargs and node.target is not aten._to_copy.default:
        return False
    if node.target is aten._to_copy.default and not set(node.kwargs) <= {"dtype"}:
        return False
    places = [_place(node, a, node) for a in node.args if isinstance(a, fx.Node)]
    if None in places:
        return False
    rest = [a for a in node.args if not isinstance(a, fx.Node)]
    # `True` is an int to Python, and another overload to torch.
    if any(not isinstance(a, (int, float)) or isinstance(a, bool) for a in rest):
        return False
    # Squares and cubes are products in torch's kernel too; other powers call a library.
    if node.target is aten.pow.Tensor_Scalar and node.args[1] not in (2, 3):
        return False
    return Place("wide", out.numel()) in places and isinstance(node.args[0], fx.Node)


def _dense(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.dtype in TYPES
        and value.is_contiguous()
        and value.storage_offset() == 0
    )


def _order(value: torch.Tensor) -> tuple[int, ...] | None:
    """The dimensions as they lie in memory, the outermost first; None where there are gaps."""
    if value.storage_offset():
        return None
    if value.is_contiguous():
        return tuple(range(value.dim()))
    # Equal strides are those of dimensions of size 1; anything else is no dense layout.
    order = sorted(range(value.dim()), key=lambda d: (-value.stride(d), d))
    return tuple(order) if value.permute(order).is_contiguous() else None


def _place(user: fx.Node, operand: fx.Node, root: fx.Node) -> Place | None:
    """How an operand is spread over the elements of the root, for whose value `user` is computed:
    of the same shape, or another that lies in memory in the same order."""
    out, made, value = facts(user).value, facts(root).value, facts(operand).value
    if not isinstance(value, torch.Tensor):
        return None
    # Through a view the shapes differ; elements then correspond only where both are dense.
    if out.shape != made.shape and not (_dense(out) and _dense(made)):
        return None
    order = _order(made if out.shape == made.shape else out)
    if order is None:
        return None
    if user.target not in APPLY or operand is user.args[0]:
        return place_of(value, out.shape, order, out.device)
    if order != tuple(range(out.dim())) or not _dense(value):
        return None
    return Place("channel", math.prod(out.shape[2:]), out.shape[1])


def _is_view(node: fx.Node) -> bool:
    """A dense tensor as another dense tensor of the same elements in the same order."""
    if node.op != "call_function" or node.target not in _VIEWS:
        return False
    source = node.args[0]
    assert isinstance(source, fx.Node)
    return _dense(facts(node).value) and _dense(facts(source).value)


# --- which values are made, and from what -------------------------------------------------------


class TooLarge(Exception):
    """An expression has too many steps or operands for one kernel."""


class _Regions:
    def __init__(self, edit: GraphEdit) -> None:
        self.smallest = edit.smallest
        self.nodes = nodes = edit.nodes
        # What is written in place has several states; an expression could read the wrong one.
        self.written = {facts(w).storage for n in nodes for w in facts(n).writes}
        self.mine = {n for n in nodes if _elementwise(n, self.smallest) and not self._is_written(n)}
        self.results = set(edit.results)
        known = set(nodes)
        # Without the users in another backward of this forward, which stands in the same graph.
        self.users = {n: [u for u in n.users if u in known] for n in nodes}
        self.made = {n for n in self.mine if self._read_by_others(n)}

    def _is_written(self, node: fx.Node) -> bool:
        return any(facts(n).storage in self.written for n in (node, *node.all_input_nodes))

    def _read_by_others(self, node: fx.Node) -> bool:
        """By an op that is no part of this, or by the caller; itself or through a view."""
        if node in self.results:
            return True
        for user in self.users[node]:
            if user in self.mine:
                continue
            if not _is_view(user) or self._read_by_others(user):
                return True
        return False

    def leave(self, nodes: set[fx.Node]) -> None:
        """These take no part."""
        self.mine -= nodes
        self.made = {n for n in self.mine if self._read_by_others(n)}

    def expressions(self) -> dict[fx.Node, "_Expression"]:
        """Per value that is made, what it is computed by."""
        while True:
            found = {n: self._collect(n) for n in self.nodes if n in self.made}
            leaves = {leaf for expression in found.values() for leaf in expression.places}
            # What an expression ends at must be there to be read, itself or what it is a view of:
            # until no more is missing, which ends since `made` only grows.
            missing = (leaves | {self._below(leaf) for leaf in leaves}) & self.mine
            if missing <= self.made:
                return found
            self.made |= missing

    def _below(self, node: fx.Node) -> fx.Node:
        while _is_view(node):
            node = node.args[0]
        return node

    def _collect(self, node: fx.Node) -> "_Expression":
        try:
            return _Expression(self, node, deep=True)
        except TooLarge:
            return _Expression(self, node, deep=False)

    def reads(self, node: fx.Node) -> set[fx.Node]:
        """What the value of an elementwise op is computed from, all the way down."""
        found: set[fx.Node] = set()
        stack, seen = [node], set()
        while stack:
            now = stack.pop()
            for arg in now.all_input_nodes:
                below = self._below(arg)
                if below in self.mine and below not in self.made:
                    if below not in seen:
                        seen.add(below)
                        stack.append(below)
                else:
                    found.add(arg)
        return found


class _Expression:
    """One expression, from its result down to what it reads."""

    def __init__(self, regions: _Regions, node: fx.Node, deep: bool) -> None:
        self.regions, self.root, self.deep = regions, node, deep
        self.places: dict[fx.Node, set[Place | None]] = {}  # of what is read, in order
        self.steps: list[Step] = []
        self.at: dict[fx.Node, tuple[str, int]] = {}
        self._add(node)

    def _add(self, node: fx.Node) -> tuple[str, int]:
        if node in self.at:
            return self.at[node]
        args = tuple(self._operand(node, a) for a in node.args)
        kwargs = tuple(sorted(node.kwargs.items()))
        # A bound on registers, and on the time that compiling takes.
        if len(self.steps) >= _MAX_STEPS:
            raise TooLarge
        step = Step(node.target, args, kwargs, facts(node).value.dtype, _is_view(node))
        self.steps.append(step)
        self.at[node] = ("step", len(self.steps) - 1)
        return self.at[node]

    def _operand(self, user: fx.Node, arg: Any) -> Any:
        if not isinstance(arg, fx.Node):
            return tuple(arg) if isinstance(arg, list) else arg
        if arg in self.at and arg not in self.places:
            return self.at[arg]
        below = self.regions._below(arg)
        mine = below in self.regions.mine and self.deep
        if mine and self._follows(below) and self._inlined(below):
            # The views on the way become steps too: they change which element is which.
            chain = []
            now = arg
            while now is not below:
                chain.append(now)
                now = now.args[0]
            ref = self._add(below)
            for view in reversed(chain):
                ref = self._add(view)
            return ref
        if arg not in self.places:
            self.at[arg] = ("leaf", len(self.places))
            self.places[arg] = set()
            if len(self.wide) > _MAX_WIDE:
                raise TooLarge
        self.places[arg].add(_place(user, arg, self.root))
        return self.at[arg]

    def _follows(self, node: fx.Node) -> bool:
        """Whether an element of the root is one of this: in whatever order of the dimensions where
        the shape is the same, else in the order of the memory."""
        value, made = facts(node).value, facts(self.root).value
        if value.shape == made.shape:
            return True
        return bool(value.numel() == made.numel() and _dense(value) and _dense(made))

    @property
    def wide(self) -> set[fx.Node]:
        smallest = self.regions.smallest
        return {n for n in self.places if facts(n).value.numel() >= smallest}

    def _inlined(self, node: fx.Node) -> bool:
        regions = self.regions
        reads = regions.reads(node)
        wide = {n for n in reads if facts(n).value.numel() >= regions.smallest}
        if node in regions.made:
            # It is there to be read: computed again only from what is read anyway.
            return bool(self.places) and wide <= set(self.places)
        late = facts(self.root).phase == "backward"
        if late and facts(node).phase == "forward":
            # The caller may change an argument between the forward and the backward: the backward
            # must not compute from it what the forward had computed.
            if any(n.op == "placeholder" for n in reads):
                return False
            # What the backward reads anyway costs no memory to read once more; anything else would
            # be kept for this alone, in the place of one value.
            others = [n for n in wide if not _used_late(n, regions)]
            return len(wide) <= 1 or not others
        # Within one phase: at most two reads, in the place of a write and a read of the value.
        return len(wide) <= 2 or len(regions.users[node]) == 1


def _used_late(node: fx.Node, regions: _Regions) -> bool:
    return any(facts(u).phase == "backward" for u in regions.users[node])


# --- putting it together ------------------------------------------------------------------------

_targets: dict[tuple[Any, str], Any] = {}


def fuse_elementwise(edit: GraphEdit) -> None:
    """Turns each value that stands for a chain of elementwise ops into one op; what nobody reads
    any more is left to be dropped."""
    inlined: set[fx.Node] = set()
    if edit.anywhere or any(facts(n).value.is_cuda for n in edit.results):
        inlined = _join(edit)
    for node in [n for n in edit.split if n not in inlined]:
        put_back(edit, node)


def _join(edit: GraphEdit) -> set[fx.Node]:
    """Makes the kernels; gives what is computed in those that read it, and nowhere else."""
    regions = _Regions(edit)
    while True:
        found = regions.expressions()
        targets = {
            node: _target_of(expression, edit.anywhere)
            for node, expression in found.items()
            if sum(not s.is_view for s in expression.steps) > 1
        }
        refused = {node for node, target in targets.items() if target is None}
        if not refused:
            break
        # These run as they are, and read what they read: those values are made.
        regions.leave(refused)
    for node, target in targets.items():
        node.target, node.args, node.kwargs = target, tuple(found[node].places), {}
        edit.split.pop(node, None)  # it has its partner
    return regions.mine - regions.made


def _target_of(expression: _Expression, anywhere: bool) -> Any:
    """None where what reads an operand does not agree on how it is spread."""
    places = []
    for found in expression.places.values():
        place = next(iter(found)) if len(found) == 1 else None
        if place is None:
            return None
        places.append(place)
    values = [facts(leaf).value for leaf in expression.places]
    made = facts(expression.root).value
    dtypes = [value.dtype for value in values]
    kernel = Kernel(expression.steps, places, dtypes, made.shape, made.stride())
    return _target(kernel, values, made, anywhere)


def _target(
    kernel: Kernel, values: Sequence[torch.Tensor], out: torch.Tensor, anywhere: bool
) -> Any:
    """The callable for this kernel, the same for equal ones; None where it is not exact here."""
    # The name holds a digest of all that the source depends on.
    key = (out.device, kernel.name)
    if key not in _targets:
        _targets[key] = None
        if _prepare(kernel, values, out, anywhere):
            target = named_call(kernel, kernel.name)
            target.over = (target, "out")
            _targets[key] = target
    return _targets[key]


def _prepare(
    kernel: Kernel, values: Sequence[torch.Tensor], out: torch.Tensor, anywhere: bool
) -> bool:
    if out.device.type != "cuda":
        return anywhere
    # A part is enough to compare and saves the memory of whole activations.
    num_parts = kernel.parts_of([v.shape for v in values], _TRIED)
    try:
        launch = CudaKernel(kernel.source(), kernel.name, out.device)
        operands = [
            _numbers(v, k, out.device, num_parts if kernel.is_cut(k, v.shape) else 1)
            for k, v in enumerate(values)
        ]
        expected = kernel.separately(*operands, num_parts=num_parts)
        kernel.launch = launch
        if same_bits(expected, kernel.part(*operands, num_parts=num_parts)):
            return True
    except RuntimeError:  # no compiler, or no memory to try
        pass
    kernel.launch = None
    return False


_SPECIAL = (0.0, -0.0, math.inf, -math.inf, math.nan, 1e-40, -1e-40, 1e30, -1e30, 1.0, -1.0, 88.0)


def _numbers(like: torch.Tensor, seed: int, device: torch.device, num_parts: int) -> torch.Tensor:
    """Numbers of many magnitudes, special ones among them, that lie as a part of this tensor."""
    shape = (like.shape[0] // num_parts, *like.shape[1:]) if like.dim() else ()
    num = 1 + sum((n - 1) * step for n, step in zip(shape, like.stride(), strict=True))
    generator = torch.Generator(device).manual_seed(seed)
    x = torch.randn(num, generator=generator, device=device, dtype=torch.float32)
    x *= torch.exp2(torch.randint(-6, 4, (1,), generator=generator, device=device))
    special = torch.tensor(_SPECIAL, device=device)
    # Each operand has them elsewhere, so that special numbers meet ordinary ones.
    x[seed : seed + 7 * len(special) : 7][: len(special)] = special[: len(x[seed::7])]
    x = x > 0 if like.dtype == torch.bool else x.to(like.dtype)
    return x.as_strided(shape, like.stride())
