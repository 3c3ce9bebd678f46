"""The recorder: a dispatch mode that writes down, as an fx graph, every op that eager PyTorch
runs on fake tensors.

It stands above FakeTensorMode and below autograd, so it sees exactly the kernels that eager would
launch, in eager's order, in-place ops included, forward and backward alike. A question to the data
(`.item()`, `if mask.all()`) is answered by running the part of the graph it depends on for real.
"""

import functools
import operator
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import fx

from rekindle.capture import op_effects
from rekindle.capture.fake_tensors import FakeRuns
from rekindle.capture.kernel_layouts import Layouts
from rekindle.capture.module_hooks import ModuleHook, empty_like
from rekindle.capture.node_facts import (
    NO_STORAGE,
    NodeFacts,
    Phase,
    Source,
    facts,
    set_facts,
    source_of,
)
from rekindle.capture.subgraph import run_slice, slice_of
from rekindle.capture.tensor_args import map_tensors
from rekindle.errors import CaptureError
from rekindle.torch_compat import (
    DEVICE_OF,
    UNSUPPORTED,
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    add_call,
    backward_node,
    forward_sequence_nr,
    interpreted_line,
    is_higher_order,
    is_overload,
    node_sequence_nr,
    outside_modes,
    pytree,
    storage_bytes,
    storage_key,
)

_TORCH_DIR = str(Path(torch.__file__).parent)
_OWN_DIR = str(Path(__file__).parent.parent)
FOREIGN = (_TORCH_DIR, _OWN_DIR, "<")  # how the names of files begin that are not the model's
_PASS = frozenset({"prim", "profiler"})


@dataclass(frozen=True, slots=True)
class Scalar:
    """A number that Python asked the data for while the model was captured."""

    target: Any
    args: tuple[Any, ...]
    value: Any
    num_before: int  # nodes of the graph that stood before it
    where: str


class Unseen(CaptureError):
    """The model's code did something that the recorder cannot see; read instead of run, it may be
    captured."""


class Recorder(TorchDispatchMode):  # type: ignore[misc]
    """Writes down each op that reaches the dispatcher, as one node of a graph, while it runs on
    fake tensors."""

    supports_higher_order_operators = True

    def __init__(self, fake_mode: FakeTensorMode) -> None:
        super().__init__()
        self.fake_mode = fake_mode
        self.graph = fx.Graph()
        self.phase: Phase = "forward"
        self.module_path: list[str] = [""]
        self.line = ""  # the source line of what runs, where no frame of it can be seen
        self.reals: dict[fx.Node, torch.Tensor] = {}
        self.constants: list[torch.Tensor] = []
        self.scalars: list[Scalar] = []
        self._node_of: dict[int, fx.Node] = {}
        self._constant_of: dict[int, torch.Tensor] = {}
        self._run = FakeRuns(fake_mode)
        self._layouts = Layouts()
        self._storages: dict[int, int] = {}
        self._path_of_sequence: dict[int, str] = {}
        self._line_of_sequence: dict[int, str] = {}
        self._alive: list[Any] = []  # keeps ids and storage keys from being used again

    # ---- what enters the graph from outside

    def placeholder(self, fake: torch.Tensor, source: Source, real: torch.Tensor | None) -> fx.Node:
        node = self.graph.placeholder(f"{source.kind}_{source.index}")
        storage, num_bytes = self._bind(node, fake)
        set_facts(node, NodeFacts(fake, storage, num_bytes, source=source))
        if real is not None:
            self.reals[node] = real
        return node

    def node_of(self, tensor: torch.Tensor) -> fx.Node:
        node = self._node_of.get(id(tensor))
        if node is None:
            raise CaptureError(
                f"a tensor of shape {tuple(tensor.shape)} came into the model's output from "
                "outside the captured ops; return tensors that the model computes"
            )
        return node

    def drop_retained_gradients(self) -> None:
        """Of tensors that forward called retain_grad() on: another backward would add to them."""
        for kept in self._alive:
            if isinstance(kept, torch.Tensor) and kept.retains_grad:
                kept.grad = None

    def storage_of(self, tensor: torch.Tensor) -> int:
        """The number of a tensor's storage; NO_STORAGE where no op was seen to make it."""
        return self._storages.get(storage_key(tensor), NO_STORAGE)

    def knows(self, tensor: torch.Tensor) -> bool:
        return id(tensor) in self._node_of

    def moved(self, node: fx.Node) -> bool:
        """Whether the tensor of this node was given another storage since (`.data = ...`)."""
        known = facts(node)
        return bool(self._storages.get(storage_key(known.value)) != known.storage)

    @staticmethod
    def _fixed(needed: list[fx.Node]) -> bool:
        kinds = {source_of(n).kind for n in needed if n.op == "placeholder"}
        return kinds <= {"constant"} and not any(op_effects.is_random(n.target) for n in needed)

    def real_value(self, tensor: torch.Tensor) -> torch.Tensor:
        """What a tensor without data would hold, computed."""
        with outside_modes(), torch.no_grad():
            node = self._node_arg(tensor)
            needed = slice_of(self.graph, [node])
            return run_slice(needed, self.reals, [node])[node].clone()

    def _bind(self, node: fx.Node, fake: torch.Tensor) -> tuple[int, int]:
        """A tensor that no node stood for: its storage, and the bytes of that."""
        if fake.layout is not torch.strided:
            raise CaptureError(
                f"{node.target} makes a tensor of layout {fake.layout}{_at(self.where())}, which "
                "has no storage of a known size; plans need dense tensors (sparse=False in "
                "nn.Embedding), or manage the submodules around it one by one"
            )
        self._node_of[id(fake)] = node
        self._alive.append(fake)
        number = self._storages.setdefault(storage_key(fake), len(self._storages))
        return number, storage_bytes(fake)

    def new_storage(self) -> int:
        """The number of a storage that no tensor has."""
        number = len(self._storages)
        self._storages[-1 - number] = number  # keys of real ones are not negative
        return number

    def _constant(self, real: torch.Tensor) -> torch.Tensor:
        """A tensor that is neither parameter, buffer nor input: kept by the graph as it is."""
        fake = self._constant_of.get(id(real))
        if fake is None:
            if real.requires_grad:
                raise Unseen(
                    f"the model uses a tensor of shape {tuple(real.shape)} that requires grad but "
                    f"is neither a registered parameter nor an argument{_at(self.where())}; "
                    "register it with nn.Parameter or pass it as an argument"
                )
            fake = self.fake_mode.from_tensor(real, static_shapes=True)
            self._constant_of[id(real)] = fake
            self._alive.append(real)
            source = Source("constant", f"constant_{len(self.constants)}", len(self.constants))
            self.constants.append(real)
            self.placeholder(fake, source, real)
        return fake

    # ---- what the model does

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is DEVICE_OF and type(args[0]) is FakeTensor:
            return args[0].fake_device
        kwargs = kwargs or {}
        way = _way(func)
        if way == "passes":
            return func(*args, **kwargs)
        args, kwargs = map_tensors(self._as_fake, args), map_tensors(self._as_fake, kwargs)
        if way == "answered":
            return self._answer(func, args, kwargs)
        if way == "refused":
            raise self._refusal(func)
        try:
            out = self._run(func, types, args, kwargs)
        except (DynamicOutputShapeException, DataDependentOutputException) as error:
            return self._fold(func, args, kwargs, error)
        except UNSUPPORTED as error:
            raise CaptureError(
                f"{func} cannot run on fake tensors{_at(self.where())}: "
                f"{_short(error)}; register a fake kernel (torch.library.register_fake)"
            ) from error
        except (RuntimeError, NotImplementedError) as error:
            if func.namespace == "aten":  # the model's own mistake, as eager would tell it
                raise
            raise CaptureError(
                f"{func} cannot run on fake tensors{_at(self.where())}: {_short(error)}; "
                "give it a fake kernel with torch.library.register_fake"
            ) from error
        out = self._layouts.correct(func, args, kwargs, out)
        if not isinstance(out, (bool, int, float, str)):
            # A plain answer comes from shapes or from the build, not from data: no op to repeat.
            self._record(func, args, kwargs, out)
        return out

    def _refusal(self, func: Any) -> CaptureError:
        if is_higher_order(func):
            return CaptureError(
                f"{func} is a higher-order op{_at(self.where())}; such ops cannot be planned: "
                "manage the submodules around it one by one"
            )
        return CaptureError(f"{func}{_at(self.where())}: {op_effects.REFUSED[func]}")

    def _as_fake(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if isinstance(tensor, FakeTensor) else self._constant(tensor)

    def _node_arg(self, tensor: torch.Tensor) -> fx.Node:
        node = self._node_of.get(id(tensor))
        if node is None or self.moved(node):
            return self._alias(tensor)
        return node

    def _nodes(self, nest: Any) -> Any:
        return map_tensors(self._node_arg, nest)

    def _alias(self, tensor: torch.Tensor) -> fx.Node:
        """A tensor object that came from no dispatched op but shares a known storage."""
        key = self._storages.get(storage_key(tensor))
        for node in self.graph.nodes:
            known = facts(node)
            if known.storage == key and known.value.dtype == tensor.dtype:
                out = self.graph.call_function(
                    torch.ops.aten.as_strided.default,
                    (node, list(tensor.shape), list(tensor.stride()), tensor.storage_offset()),
                )
                self._describe(out, tensor, is_new=True)
                return out
        raise Unseen(
            f"a tensor of shape {tuple(tensor.shape)} was made outside the ops that can be "
            f"seen{_at(self.where())}; make tensors with torch functions inside forward"
        )

    def _record(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        node_args, node_kwargs = self._nodes(args), self._nodes(kwargs)
        node = add_call(self.graph, "call_function", func, node_args, node_kwargs)
        self._alive.append(out)
        # An in-place op gives back its argument.
        is_new = isinstance(out, torch.Tensor) and not self.knows(out)
        self._describe(node, out, is_new=is_new)
        if isinstance(out, (list, tuple)):
            for i, item in enumerate(out):
                if isinstance(item, torch.Tensor) and not self.knows(item):
                    part = add_call(self.graph, "call_function", operator.getitem, (node, i), {})
                    self._describe(part, item, is_new=True)

    def call_hook(self, hook: ModuleHook, gave: Any, got: Any) -> list[Any]:
        """A backward hook of a module, as a call of the graph; nothing runs now."""
        with outside_modes(), self.fake_mode:
            out = [None if g is None else empty_like(g) for g in gave]
        given = [list(gave), None if got is None else list(got)]
        self._record(hook, tuple(given), {}, out)
        return out

    def _describe(self, node: fx.Node, value: Any, *, is_new: bool) -> None:
        storage, num_bytes = self._bind(node, value) if is_new else (NO_STORAGE, 0)
        running = backward_node() if self.phase == "backward" else None
        if running is not None:
            sequence_nr = node_sequence_nr(running)
            module = self._path_of_sequence.get(sequence_nr, "")
        else:
            sequence_nr = forward_sequence_nr() if self.phase == "forward" else -1
            module = self.module_path[-1]
            if self.phase == "forward":
                self._path_of_sequence.setdefault(sequence_nr, module)
        writes = op_effects.written_nodes(node)
        where = self.where()
        if self.phase == "forward":
            self._line_of_sequence.setdefault(sequence_nr, where)
        known = NodeFacts(value, storage, num_bytes, writes, self.phase, sequence_nr, module, where)
        set_facts(node, known)

    def where(self) -> str:
        """The innermost source line that is neither torch's nor ours; in a backward that has none
        of its own, the line of the op whose backward it is."""
        if self.line:
            return self.line
        frame = sys._getframe(1)
        while frame is not None:
            line = interpreted_line(frame)
            if line:
                return line
            name = frame.f_code.co_filename
            if not name.startswith(FOREIGN):
                return f"{name}:{frame.f_lineno}"
            if self.phase == "backward" and name.startswith(_OWN_DIR) and name != __file__:
                break  # what called the backward is no part of the model
            frame = frame.f_back  # type: ignore[assignment]
        running = backward_node() if self.phase == "backward" else None
        return "" if running is None else self._line_of_sequence.get(node_sequence_nr(running), "")

    # ---- questions to the data

    def _answer(self, func: Any, args: Any, kwargs: Any) -> Any:
        nodes = self._nodes(tuple(args))
        value = self._for_real(func, nodes, kwargs)
        where = self.where()
        self.scalars.append(Scalar(func, nodes, value, len(self.graph.nodes), where))
        return value

    def numpy(self, tensor: torch.Tensor) -> Any:
        """The array that Python asks for. What it holds is an assumption, like a number."""
        if tensor.requires_grad:
            raise RuntimeError(
                "Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() "
                "instead."
            )
        if self.phase == "backward":
            raise CaptureError(f"the backward asks for an array{_at(self.where())}")
        node, real = self._node_arg(tensor), self.real_value(tensor)
        seen = self._node_arg(self._constant(real))
        equal = torch.ops.aten.equal.default
        self.scalars.append(Scalar(equal, (node, seen), True, len(self.graph.nodes), self.where()))
        with outside_modes():
            return real.clone().numpy()  # Python may write into it

    def _fold(self, func: Any, args: Any, kwargs: Any, error: Exception) -> Any:
        """An op whose output shape depends on data: possible only where the data are constants."""
        nodes, node_kwargs = self._nodes(tuple(args)), self._nodes(kwargs)
        inner = [n for n in pytree.tree_leaves((nodes, node_kwargs)) if isinstance(n, fx.Node)]
        needed = slice_of(self.graph, inner)
        if self._fixed(needed):
            real = self._for_real(func, nodes, node_kwargs)
            return pytree.tree_map_only(torch.Tensor, self._constant, real)
        raise CaptureError(
            f"{func} has an output whose shape depends on the data{_at(self.where())}; "
            "plans need static shapes: pad, or mask with torch.where, or manage the submodules "
            "around it one by one"
        ) from error

    def _for_real(self, func: Any, nodes: Any, kwargs: Any) -> Any:
        wanted = [n for n in pytree.tree_leaves(nodes) if isinstance(n, fx.Node)]
        needed = slice_of(self.graph, wanted)
        missing = [n for n in needed if n.op == "placeholder" and n not in self.reals]
        if missing:
            raise CaptureError(
                f"Python asks for data with {func}{_at(self.where())}, and "
                f"{source_of(missing[0]).name} has none; give real tensors"
            )
        with outside_modes(), torch.no_grad():
            values = run_slice(needed, self.reals, wanted)
            real = pytree.tree_map(lambda a: values[a] if isinstance(a, fx.Node) else a, nodes)
            return func(*real, **kwargs)


@functools.cache
def _way(func: Any) -> Literal["recorded", "passes", "answered", "refused"]:
    """What the recorder does with calls of this op."""
    if is_overload(func) and func.namespace in _PASS:
        return "passes"
    if func in op_effects.SCALAR_OPS:
        return "answered"
    return "refused" if is_higher_order(func) or func in op_effects.REFUSED else "recorded"


def _short(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]


def _at(where: str) -> str:
    return f" at {where}" if where else ""
