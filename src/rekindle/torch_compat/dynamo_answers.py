"""What code hears that Dynamo reads, where Dynamo's own answer would not be eager's.

Whether it is being compiled: no. A number read from a tensor (`.item()`, `if mask.all()`): what the
data says, asked through `ask`; the question is guarded by who answers it. All changes to Dynamo
hold inside `answering` alone, while its compile lock is held.
"""

import contextlib
import dis
import functools
import inspect
import logging
import os
import random
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import fx

from rekindle.errors import CaptureError
from rekindle.torch_compat.dynamo_backward import ReadLater, backward_reads_noted
from rekindle.torch_compat.dynamo_globals import globals_of_any_scope
from rekindle.torch_compat.dynamo_guards import guarded_as_read
from rekindle.torch_compat.dynamo_patches import attribute_reader
from rekindle.torch_compat.dynamo_reads import read_as_eager_runs
from rekindle.torch_compat.fake_tensors import eager_layouts_answered
from rekindle.torch_compat.prepared import Prepared, left_as_it_was


class Ask(Protocol):
    """The value of a node of the graph that is being read, `.item()` of it."""

    def __call__(self, graph: fx.Graph, attributes: Mapping[str, Any], node: fx.Node) -> Any: ...


@dataclass(frozen=True, slots=True)
class Unguarded:
    """What was read, and what Dynamo's guards do not hold."""

    aspects: dict[tuple[str, str], Any] = field(default_factory=dict)  # by source and attribute
    imported: list[str] = field(default_factory=list)  # modules, inside of functions
    reads: list[str] = field(default_factory=list)
    prepared: Prepared = field(default_factory=Prepared)
    later: ReadLater = field(default_factory=ReadLater)  # by the backward's Python

    @property
    def environment(self) -> bool:
        return bool(self.reads)


def asked(_tensor: torch.Tensor) -> None:
    """Stands in a graph where a number was read from a tensor."""


class Returned:
    """The nodes of what a call returns."""

    __slots__ = ("losses", "tensors")

    def __init__(self) -> None:
        self.tensors: tuple[fx.Node, ...] = ()
        self.losses: tuple[fx.Node, ...] = ()  # those called so, `out.loss` or `out["loss"]`


# Code of libraries that asks whether it is compiled for its own plumbing (may a ContextVar be used)
# and not for what it computes: it hears yes, or Dynamo could not read on.
_PLUMBING = frozenset(
    {"CompileableContextVar.set", "_register_model_output_pytree_node", "_are_we_tracing"}
)
# Functions of libraries whose answer in eager is known, and whose code cannot be read.
_CONSTANT = {("transformers.utils.import_utils", "is_tracing"): False}
# Functions of shapes alone whose code cannot be read, run as they are.
_OF_SHAPES = (
    ("opt_einsum.contract", "contract_path"),
    ("opt_einsum.backends.dispatch", "get_func"),
    ("opt_einsum.sharing", "currently_sharing"),
)
# Functions that prepare a model once, at its first call: run as they are.
_PREPARING = (("transformers.utils.output_capturing", "maybe_install_capturing_hooks"),)
# Code through which os.environ is read.
_ENVIRONMENT = frozenset(
    {os.getenv.__code__, type(os.environ).__getitem__.__code__, type(os.environ).get.__code__}
)
_UNGUARDED = frozenset({"is_leaf"})  # attributes of a tensor
# Libraries whose loggers say a thing once; a line less is what a second step would print anyway.
_QUIET = ("transformers", "diffusers", "timm", "peft", "accelerate")


@contextlib.contextmanager
def answering(
    ask: Ask, mark: Callable[..., Any], returned: Returned, module_hooks: Callable[..., Any]
) -> Iterator[Unguarded]:
    """Inside, Dynamo gives eager's answers. A call of `mark` on what a model returns fills in
    `returned`, and is no part of the graph; `module_hooks` makes what is. Gives what is read
    without a guard."""
    unguarded = Unguarded()
    with contextlib.ExitStack() as stack:
        stack.enter_context(_told_that_it_is_not_compiled())
        stack.enter_context(eager_layouts_answered())
        stack.enter_context(_functions_answered(mark, returned, unguarded))
        stack.enter_context(_loggers_answered())
        stack.enter_context(_numbers_answered(ask))
        stack.enter_context(_missing_attributes_guarded())
        stack.enter_context(_aspects_noted(unguarded.aspects))
        stack.enter_context(_imports_noted(unguarded.imported))
        stack.enter_context(_own_streams_refused())
        stack.enter_context(globals_of_any_scope())
        stack.enter_context(_data_given())
        stack.enter_context(_recurrent_functions_plain())
        stack.enter_context(read_as_eager_runs(module_hooks))
        stack.enter_context(guarded_as_read())
        stack.enter_context(backward_reads_noted(unguarded.later))
        yield unguarded


@contextlib.contextmanager
def _set(owner: Any, name: str, value: Any) -> Iterator[None]:
    saved = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if saved is None:  # it was inherited
            delattr(owner, name)
        else:
            setattr(owner, name, saved)


@contextlib.contextmanager
def _told_that_it_is_not_compiled() -> Iterator[None]:
    from torch._dynamo.variables.torch import TorchInGraphFunctionVariable, tracing_state_functions

    def asked(_function: Any, tx: Any, *_args: Any, **_kwargs: Any) -> Any:
        return _constant(_is_plumbing(tx))

    def no(_function: Any, _tx: Any, *_args: Any, **_kwargs: Any) -> Any:
        return _constant(False)

    handlers = TorchInGraphFunctionVariable._get_handlers()
    saved = dict(handlers)
    handlers.update({q: asked for q, answer in tracing_state_functions().items() if answer})
    handlers[torch.compiler.is_exporting] = no
    handlers[torch.cuda.is_current_stream_capturing] = no
    try:
        yield
    finally:
        handlers.clear()
        handlers.update(saved)


def _is_plumbing(tx: Any) -> bool:
    for _ in range(3):
        if tx is None:
            return False
        if tx.f_code.co_qualname in _PLUMBING:
            return True
        tx = getattr(tx, "parent", None)
    return False


def _constant(value: Any) -> Any:
    from torch._dynamo.variables import ConstantVariable

    return ConstantVariable.create(value)


@contextlib.contextmanager
def _functions_answered(
    mark: Callable[..., Any], returned: Returned, unguarded: Unguarded
) -> Iterator[None]:
    from torch._dynamo.variables.functions import UserFunctionVariable

    answers: dict[types.CodeType, Any] = {
        code: _CONSTANT[place] for code, place in _codes(_CONSTANT).items()
    }
    # It looks by addresses whether the weights lie in one block.
    answers[torch.nn.RNNBase.flatten_parameters.__code__] = None
    of_shapes, preparing = _codes(_OF_SHAPES), _codes(_PREPARING)
    read = UserFunctionVariable.call_function

    @functools.wraps(read)
    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        code = getattr(self.fn, "__code__", None)
        if code is mark.__code__:
            returned.tensors = _nodes(args[0])
            returned.losses = _loss_nodes(tx, args[0])
            return _constant(None)
        if code in answers:
            return _constant(answers[code])
        if code in _ENVIRONMENT:
            unguarded.reads.append("os.environ")
        if code in of_shapes:
            return _run_on_shapes(tx, self.fn, args, kwargs)
        if code in preparing:
            (model,) = (argument.value for argument in args)
            undone.enter_context(left_as_it_was(model))
            unguarded.prepared.prepare(self.fn, model)
            return _constant(None)
        return read(self, tx, args, kwargs)

    with (
        contextlib.ExitStack() as undone,
        _set(UserFunctionVariable, "call_function", call_function),
    ):
        yield


def _codes(places: Iterable[tuple[str, str]]) -> dict[types.CodeType, tuple[str, str]]:
    """The code of functions of modules that are imported."""
    found = {}
    for module, name in places:
        function = getattr(sys.modules.get(module), name, None)
        if isinstance(function, types.FunctionType):
            found[function.__code__] = (module, name)
    return found


def _run_on_shapes(tx: Any, function: Any, args: Any, kwargs: Any) -> Any:
    """Runs a function that only asks tensors for their shapes, on fake tensors."""
    from torch._dynamo.variables import ListVariable, TensorVariable, TupleVariable
    from torch._dynamo.variables.base import VariableTracker

    tensors: dict[int, Any] = {}

    def example(variable: Any) -> Any:
        if not isinstance(variable, TensorVariable):
            return variable.as_python_constant()
        value = variable.as_proxy().node.meta["example_value"]
        tensors[id(value)] = variable
        return value

    def variable(value: Any) -> Any:
        if id(value) in tensors:
            return tensors[id(value)]
        if type(value) is list:
            return ListVariable([variable(v) for v in value])
        if type(value) is tuple:
            return TupleVariable([variable(v) for v in value])
        if type(value) in (set, frozenset):
            value = frozenset(value)
        return VariableTracker.build(tx, value)

    given = [example(argument) for argument in args]
    return variable(function(*given, **{k: example(v) for k, v in kwargs.items()}))


def _nodes(out: Any) -> tuple[fx.Node, ...]:
    from torch._dynamo.variables import TensorVariable
    from torch._dynamo.variables.base import VariableTracker

    found: list[fx.Node] = []

    def visit(variable: Any) -> None:
        if isinstance(variable, TensorVariable):
            found.append(variable.as_proxy().node)

    VariableTracker.visit(visit, out)
    return tuple(found)


def _loss_nodes(tx: Any, out: Any) -> tuple[fx.Node, ...]:
    from torch._dynamo.variables import ConstDictVariable, TensorVariable

    if isinstance(out, TensorVariable):
        return ()
    try:
        if isinstance(out, ConstDictVariable):
            found = out.call_method(tx, "get", [_constant("loss")], {})
        else:
            kind = out.python_type()
            if issubclass(kind, (tuple, list)) and not hasattr(kind, "_fields"):
                return ()
            found = getattr(out, attribute_reader(type(out)))(tx, "loss")
    except Exception:  # it has none
        return ()
    return _nodes(found) if isinstance(found, TensorVariable) else ()


@contextlib.contextmanager
def _loggers_answered() -> Iterator[None]:
    from torch._dynamo.variables.misc import LoggingLoggerVariable

    read = LoggingLoggerVariable.call_method

    @functools.wraps(read)
    def call_method(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        logger = self.value
        level = logging.getLevelName(name.upper())
        silent = isinstance(level, int) and not logger.isEnabledFor(level)
        if silent or logger.name.split(".")[0] in _QUIET:
            return _constant(None)
        return read(self, tx, name, args, kwargs)

    with _set(LoggingLoggerVariable, "call_method", call_method):
        yield


@contextlib.contextmanager
def _missing_attributes_guarded() -> Iterator[None]:
    """Dynamo guards an attribute that it finds, and not one whose absence the model handles."""
    from torch._dynamo.exc import ObservedAttributeError
    from torch._dynamo.guards import GuardBuilder, install_guard
    from torch._dynamo.source import AttrSource
    from torch._dynamo.variables import UnspecializedNNModuleVariable

    method = attribute_reader(UnspecializedNNModuleVariable)
    read = getattr(UnspecializedNNModuleVariable, method)

    @functools.wraps(read)
    def var_getattr(self: Any, tx: Any, name: str) -> Any:
        try:
            return read(self, tx, name)
        except ObservedAttributeError:
            if self.source is not None:
                if "attr" in inspect.signature(GuardBuilder.HASATTR).parameters:
                    there = functools.partial(GuardBuilder.HASATTR, attr=name)
                    install_guard(self.source.make_guard(there))
                else:  # torch 2.11
                    source = AttrSource(self.source, name)
                    install_guard(source.make_guard(GuardBuilder.HASATTR))
            raise

    with _set(UnspecializedNNModuleVariable, method, var_getattr):
        yield


@contextlib.contextmanager
def _aspects_noted(aspects: dict[tuple[str, str], Any]) -> Iterator[None]:
    from torch._dynamo.variables import TensorVariable

    method = attribute_reader(TensorVariable)
    read = getattr(TensorVariable, method)

    @functools.wraps(read)
    def var_getattr(self: Any, tx: Any, name: str) -> Any:
        found = read(self, tx, name)
        if name in _UNGUARDED and self.source is not None and found.is_python_constant():
            source = self.source.name
            aspects[source() if callable(source) else source, name] = found.as_python_constant()
        return found

    with _set(TensorVariable, method, var_getattr):
        yield


@contextlib.contextmanager
def _imports_noted(imported: list[str]) -> Iterator[None]:
    """Dynamo imports a module once, and guards nothing about it."""

    def change(name: str, read: Any) -> Any:
        if name != "IMPORT_NAME":
            return None

        def note(self: Any, instruction: Any) -> None:
            imported.append(instruction.argval)
            read(self, instruction)

        return note

    with _instructions_read(change):
        yield


def give_data(tensor: torch.Tensor, data: torch.Tensor) -> None:
    """Stands in a graph for `tensor.data = data`."""
    tensor.data = data


@contextlib.contextmanager
def _data_given() -> Iterator[None]:
    """`tensor.data = data`, of a tensor that forward has made, becomes a node of the graph."""
    from torch._dynamo.variables import TensorVariable

    def plain(variable: Any) -> Any:
        if isinstance(variable, TensorVariable) and variable.source is None:
            value = variable.proxy.node.meta.get("example_value")
            return None if value is None else (value.shape, value.dtype, value.device)
        return None

    def change(name: str, read: Any) -> Any:
        if name != "STORE_ATTR":
            return None

        def give(self: Any, instruction: Any) -> None:
            if instruction.argval != "data" or len(self.output.tracers) > 1:
                read(self, instruction)
                return
            data, tensor = self.stack[-2:]
            if plain(tensor) is None or plain(tensor) != plain(data):
                read(self, instruction)
                return
            self.popn(2)
            proxies = (tensor.as_proxy(), data.as_proxy())
            self.output.create_proxy("call_function", give_data, proxies, {})

        return give

    with _instructions_read(change):
        yield


_RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")


@contextlib.contextmanager
def _recurrent_functions_plain() -> Iterator[None]:
    """nn.LSTM and its kin end in torch's own functions, whatever stands in for them: who follows
    the graph calls what stands there."""
    from torch.nn.modules import rnn

    found = {name: vars(torch._VF).pop(name) for name in _RECURRENT if name in vars(torch._VF)}
    table = dict(rnn._rnn_impls)
    rnn._rnn_impls.update({name: getattr(torch._VF, name.lower()) for name in table})
    try:
        yield
    finally:
        rnn._rnn_impls.update(table)
        vars(torch._VF).update(found)


@contextlib.contextmanager
def _own_streams_refused() -> Iterator[None]:
    """A `random.Random` of the model's own would go on from where it was when it was read."""
    from torch._dynamo.variables.builder import VariableBuilder

    read = VariableBuilder._wrap

    @functools.wraps(read)
    def wrap(self: Any, value: Any) -> Any:
        if isinstance(value, random.Random):
            raise CaptureError(
                "forward draws from a random.Random, which a plan would freeze; draw with torch"
            )
        return read(self, value)

    with _set(VariableBuilder, "_wrap", wrap):
        yield


@contextlib.contextmanager
def _numbers_answered(ask: Ask) -> Iterator[None]:
    """`.item()`, and a tensor as the condition of a branch, become what the data says."""
    from torch._dynamo.symbolic_convert import InstructionTranslator, InstructionTranslatorBase
    from torch._dynamo.variables import TensorVariable

    read_item = TensorVariable.method_item

    @functools.wraps(read_item)
    def method_item(self: Any, *args: Any, **kwargs: Any) -> Any:
        tx = args[0] if args and isinstance(args[0], InstructionTranslatorBase) else None
        found = _number(ask, self, tx or InstructionTranslator.current_tx())
        return read_item(self, *args, **kwargs) if found is None else found

    change = functools.partial(_decision, ask)
    with _set(TensorVariable, "method_item", method_item), _instructions_read(change):
        yield


@contextlib.contextmanager
def _instructions_read(change: Callable[[str, Any], Any]) -> Iterator[None]:
    """Inside, `change(name, read)` gives what reads an instruction, where it gives something."""
    from torch._dynamo.symbolic_convert import (
        InliningGeneratorInstructionTranslator,
        InliningInstructionTranslator,
        InstructionTranslator,
        InstructionTranslatorBase,
    )

    translators = (
        *(InstructionTranslator, InliningInstructionTranslator),
        *(InliningGeneratorInstructionTranslator, InstructionTranslatorBase),
    )
    saved = [(cls, cls.dispatch_table) for cls in translators]
    for cls, table in saved:
        cls.dispatch_table = list(table)
        for name, opcode in dis.opmap.items():
            # Pseudo instructions, which stand in no code, have numbers beyond the table.
            read = table[opcode] if opcode < len(table) else None
            other = None if read is None else change(name, read)
            if other is not None:
                cls.dispatch_table[opcode] = other
    try:
        yield
    finally:
        for cls, table in saved:
            cls.dispatch_table = table


def _number(ask: Ask, tensor: Any, tx: Any) -> Any:
    """The number in a tensor, as Dynamo's constant; None where it is no single number, or where
    the tensor belongs to a subgraph, which may run another number of times."""
    output = tx.output
    if tensor.proxy.tracer is not output.root_tracer or len(output.tracers) > 1:
        return None
    node = tensor.proxy.node
    example = node.meta.get("example_value")
    if example is None or example.numel() != 1:
        return None
    answer = ask(output.graph, output.nn_modules, node)
    # Inputs that no node reads are taken out of the graph, and this one is asked again.
    output.create_proxy("call_function", asked, (tensor.as_proxy(),), {})
    return _constant(answer)


def _decision(ask: Ask, name: str, read: Any) -> Any:
    """In place of `read`, what runs an instruction of this name; None where it decides nothing."""
    jumps = "JUMP" in name and name.endswith(("IF_TRUE", "IF_FALSE", "_OR_POP"))
    if not jumps and name not in ("UNARY_NOT", "TO_BOOL"):
        return None

    def decide(self: Any, instruction: Any) -> None:
        answer = _truth(ask, self)
        if answer is None:
            read(self, instruction)
        elif not jumps:
            self.pop()
            self.push(_constant(answer is (name == "TO_BOOL")))
        else:
            taken = answer is ("IF_TRUE" in name)
            if not (taken and name.endswith("_OR_POP")):  # which leaves the tensor where it jumps
                self.pop()
            if taken:
                self.jump(instruction)

    return decide


def _truth(ask: Ask, tx: Any) -> bool | None:
    """What the tensor on top of the stack means to an `if`, if a tensor is there."""
    from torch._dynamo.variables import TensorVariable

    top = tx.stack[-1]
    if not isinstance(top, TensorVariable):
        return None
    found = _number(ask, top, tx)
    return None if found is None else bool(found.value)
