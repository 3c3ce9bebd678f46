"""The recorder on the graph of torch calls that the front door found in a call.

The graph's nodes run one after another on fake tensors, under the autograd engine, with the
recorder below it. It can be followed while it is still being read: that is how a question to the
data (`.item()`, `if mask.all()`) is answered, by the recorder, which also remembers it.
"""

import contextlib
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from rekindle.capture import cudnn_rnn
from rekindle.capture.autocast import autocast_state, set_autocast
from rekindle.capture.fake_tensors import fake_tensors_answer, stand_in
from rekindle.capture.gc_pause import collector_at_rest
from rekindle.capture.module_hooks import ModuleHooks
from rekindle.capture.node_facts import Kind, Source
from rekindle.capture.recorder import Recorder
from rekindle.errors import CaptureError
from rekindle.torch_compat import (
    FakeTensor,
    NotASize,
    as_modules_call,
    asked,
    eager_layouts_answered,
    every_decision_noted,
    has_symbols,
    is_saved_region,
    is_symbolic,
    new_fake_mode,
    outside_function_modes,
    outside_modes,
    recurrent_layers_call,
    run_saved_regions_plainly,
    source_line,
    told_without_nodes,
    tracing_symbols,
)

_WORD = re.compile(r"\w+")


class Names:
    """What the tensors of a model and of its arguments are called."""

    def __init__(self, model: nn.Module, named_inputs: Mapping[str, torch.Tensor]) -> None:
        self.of: dict[int, tuple[Kind, str]] = {}
        self.modules = {name for name, _ in model.named_modules()}
        parts: tuple[tuple[Kind, Any], ...] = (
            ("parameter", model.named_parameters()),
            ("buffer", model.named_buffers()),
            ("input", named_inputs.items()),
        )
        for name, module in model.named_modules():
            if isinstance(module, torch.jit.ScriptModule):
                raise CaptureError(
                    f"{name or 'the model'} is a TorchScript module, whose code is not Python: its "
                    "ops and parameters cannot be followed; use the nn.Module it was made from"
                )
        for kind, items in parts:
            for name, tensor in items:
                self.of.setdefault(id(tensor), (kind, name))


class Follower:
    """Records the graph of a call, as far as it has been read."""

    def __init__(self, names: Names, with_symbols: bool = False) -> None:
        self._names = names
        self._with_symbols = with_symbols  # some sizes of the arguments change
        self._first_state = _State.now()
        self.with_gradients = torch.is_grad_enabled()
        # Nodes of the graph: all that the call returns, and what it calls its loss.
        self.returned: tuple[fx.Node, ...] = ()
        self.losses: tuple[fx.Node, ...] = ()
        self._start_over(None)

    def _start_over(self, graph: fx.Graph | None, symbols: Any = None) -> None:
        self.graph = graph
        # Its fake tensors share Dynamo's symbols: what is decided of a size, by the code that was
        # read or by an op that runs here, is noted in one place.
        if symbols is None and self._with_symbols and graph is not None:
            symbols = tracing_symbols()
        self.symbols = symbols
        self.recorder = Recorder(new_fake_mode(self.symbols))
        self.values: dict[fx.Node, Any] = {}
        self.leaves: list[torch.Tensor] = []
        self._made: list[torch.Tensor] = []  # of numbers that enter the graph
        # Nodes of the graph whose tensors forward makes to require grad.
        self.made_to_require: list[fx.Node] = []
        self.has_inner_inputs = False  # inputs that require grad and are no leaves
        self.entries: dict[fx.Node, fx.Node] = {}  # the record's placeholders, by the graph's
        self._devices: dict[torch.device, str] = {}
        self._number: dict[Kind, int] = {}
        self._state = self._first_state

    def ask(self, graph: fx.Graph, attributes: Mapping[str, Any], node: fx.Node) -> Any:
        """The number in the tensor of a node, `.item()`."""
        self.follow(graph, attributes, self._examples)
        with self._running():
            self.recorder.line = source_line(node)
            return _Run(self, attributes, self._examples).value(node).item()

    def follow(
        self,
        graph: fx.Graph,
        attributes: Mapping[str, Any],
        example: Callable[[fx.Node], tuple[Any, Any]],
        symbols: Any = None,
    ) -> None:
        """Runs what has come to the graph since the last time. `example` gives the value of an
        input, and what it was read as; `symbols` are the graph's, if it was read to its end."""
        if graph is not self.graph:
            self._start_over(graph, symbols)
        self._example = example
        with self._running():
            run = _Run(self, attributes, example)
            for node in graph.nodes:
                if node not in self.values and node.op not in ("placeholder", "output"):
                    self.values[node] = run.node(node)

    @staticmethod
    def _examples(node: fx.Node) -> tuple[Any, Any]:
        return node.meta["grapharg"].example, node.meta.get("example_value")

    @contextlib.contextmanager
    def _running(self) -> Iterator[None]:
        """The grad mode and autocast of the code that is followed, not of the code that reads."""
        others = _State.now()
        self._state.set()
        try:
            with contextlib.ExitStack() as stack:
                stack.enter_context(collector_at_rest())
                stack.enter_context(told_without_nodes(CaptureError))
                stack.enter_context(outside_modes())
                stack.enter_context(outside_function_modes())  # whose calls Dynamo has read
                stack.enter_context(run_saved_regions_plainly())
                stack.enter_context(eager_layouts_answered())
                stack.enter_context(fake_tensors_answer(self.recorder.numpy))
                stack.enter_context(recurrent_layers_call(cudnn_rnn.run))
                stack.enter_context(self.recorder.fake_mode)
                stack.enter_context(self.recorder)
                if self.symbols is not None:
                    stack.enter_context(every_decision_noted(self.symbols))
                yield
        finally:
            self._state = _State.now()
            if autocast_state():
                torch.clear_autocast_cache()  # of fake tensors
            others.set()

    def enter(self, node: fx.Node, real: Any, read_as: Any) -> Any:
        """What stands in for an input of the graph."""
        if is_symbolic(read_as):  # a size, which is no tensor of the record
            return real if self.symbols is None else read_as
        if not isinstance(real, torch.Tensor):
            real = torch.tensor(real)
            self._made.append(real)
        kind, name = self._names.of.get(id(real), ("input", node.name))
        _check_plain(name, real)
        with outside_modes():
            fake = _fake(self.recorder, real, None if self.symbols is None else read_as)
        index = self._number.get(kind, 0)
        self._number[kind] = index + 1
        data = None if isinstance(real, FakeTensor) or real.is_meta else real
        self._note_device(name, real)
        self.entries[node] = self.recorder.placeholder(fake, Source(kind, name, index), data)
        if self.with_gradients and fake.requires_grad:
            self.leaves.append(fake)
            self.has_inner_inputs |= not real.is_leaf
        return fake

    def note_required(self, node: Any, fake: torch.Tensor) -> None:
        """Forward makes this tensor require grad; one that it was given is a leaf from here on."""
        if node in self.entries and self.with_gradients and not fake.requires_grad:
            self.leaves.append(fake)
            self.made_to_require.append(node)

    def value(self, node: fx.Node) -> Any:
        """What a node of the graph stands for; of an input that no op reads, a stand-in."""
        with self._running():
            return _Run(self, {}, self._example).value(node)

    def _note_device(self, name: str, real: torch.Tensor) -> None:
        if real.dim() or real.device.type != "cpu":
            self._devices.setdefault(real.device, name)

    def device(self) -> torch.device:
        """Where the call runs."""
        if len(self._devices) > 1:
            places = ", ".join(f"{name} on {device}" for device, name in self._devices.items())
            raise CaptureError(
                f"the model and its arguments are spread over several devices ({places}); put them "
                "on one device, or manage each part alone"
            )
        return next(iter(self._devices), torch.device("cpu"))

    def path(self, node: fx.Node) -> str:
        """The module's name out of Dynamo's expression for it, such as L['model'].blocks[0]."""
        stack = node.meta.get("nn_module_stack") or {}
        for expression, _ in reversed(list(stack.values())):
            steps = [s for s in _WORD.findall(expression) if s != "_modules"]
            for start in range(len(steps)):
                name = ".".join(steps[start:])
                if name in self._names.modules:
                    return name
        return ""


class _Run:
    """Runs nodes of a graph, or of one of its subgraphs, under the recorder."""

    def __init__(
        self,
        follower: Follower,
        attributes: Mapping[str, Any],
        example: Callable[[fx.Node], tuple[Any, Any]] | None,
        values: dict[fx.Node, Any] | None = None,
    ) -> None:
        self.follower = follower
        self.attributes = attributes
        self.example = example
        self.values = follower.values if values is None else values

    def value(self, node: fx.Node) -> Any:
        if node not in self.values:
            assert self.example is not None  # subgraphs are given all their inputs
            if node.op != "placeholder":  # torch 2.11, where a hook reads what the tensor made
                raise CaptureError(
                    f"torch {torch.__version__} reads this call in an order that cannot run "
                    f"(at {source_line(node)}): a hook on a tensor that forward makes; a newer "
                    "torch plans it"
                )
            self.values[node] = self.follower.enter(node, *self.example(node))
        return self.values[node]

    def node(self, node: fx.Node) -> Any:
        recorder = self.follower.recorder
        recorder.module_path[-1] = self.follower.path(node)
        recorder.line = source_line(node)
        try:
            if node.op == "get_attr":
                found = operator.attrgetter(str(node.target))(_Attributes(self.attributes))
                if isinstance(found, ModuleHooks):
                    found.record = recorder.call_hook
                return found
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), self.value)
            if node.op == "call_method":
                if node.target == "requires_grad_":
                    self.follower.note_required(node.args[0], args[0])
                return getattr(args[0], str(node.target))(*args[1:], **kwargs)
            if node.op == "call_module":
                return self.attributes[str(node.target)](*args, **kwargs)
            assert callable(node.target)
            if node.target is asked:
                return None
            if is_saved_region(node.target):  # the schedule decides what is kept
                return self.subgraph(args[0], args[1:])
            # cuDNN's layers are called in a way of their own (`recurrent_layers_call`).
            return as_modules_call(node.target)(*args, **kwargs)
        except RuntimeError as error:
            if self.follower.has_inner_inputs and "leaf Variable that requires grad" in str(error):
                raise CaptureError(
                    f"forward writes in place into an argument that was computed with gradients "
                    f"(at {recorder.line}), whose stand-in is a leaf; write into a clone"
                ) from error
            raise
        finally:
            recorder.line = ""

    def subgraph(self, region: fx.GraphModule, given: Sequence[Any]) -> Any:
        values: dict[fx.Node, Any] = {}
        run = _Run(self.follower, dict(region.named_children()) | vars(region), None, values)
        rest = iter(given)
        for node in region.graph.nodes:
            if node.op == "output":
                return fx.node.map_arg(node.args[0], run.value)
            values[node] = next(rest) if node.op == "placeholder" else run.node(node)
        raise AssertionError("a graph without an output")


class _Attributes:
    """A mapping whose items are read as attributes."""

    def __init__(self, items: Mapping[str, Any]) -> None:
        self.__dict__.update(items)


@dataclass(frozen=True, slots=True)
class _State:
    """The grad mode and autocast."""

    grad: bool
    autocast: tuple[Any, ...]

    @staticmethod
    def now() -> "_State":
        return _State(torch.is_grad_enabled(), autocast_state())

    def set(self) -> None:
        torch.set_grad_enabled(self.grad)
        set_autocast(self.autocast)


def _check_plain(name: str, tensor: torch.Tensor) -> None:
    plain = type(tensor) in (torch.Tensor, nn.Parameter, nn.Buffer, FakeTensor)
    if not plain or tensor.is_sparse or tensor.is_nested:
        raise CaptureError(
            f"{name} is a {type(tensor).__name__} ({tensor.layout}); only plain dense tensors "
            "can be planned for now"
        )


def _fake(recorder: Recorder, real: torch.Tensor, read_as: Any) -> torch.Tensor:
    mode = recorder.fake_mode
    if isinstance(read_as, FakeTensor) and has_symbols(read_as):
        if real._is_view() or real.storage_offset():
            raise NotASize("an argument of changing sizes that is a view of another tensor")
        with mode:
            fake = torch.empty_strided(
                read_as.shape, read_as.stride(), dtype=real.dtype, device=real.device
            )
        return fake.requires_grad_(real.requires_grad)
    if isinstance(real, FakeTensor):
        with mode:
            fake = torch.empty_strided(
                real.shape, real.stride(), dtype=real.dtype, device=real.fake_device
            )
        return fake.requires_grad_(real.requires_grad)
    if type(real) is torch.Tensor:
        fake = stand_in(mode, real.detach())
        return fake.requires_grad_(real.requires_grad)
    return stand_in(mode, real)
