"""Dynamo, which reads the Python of a call: the graph of its torch calls, guards on everything that
was read, and bytecode that replays what the call does to Python objects.

`compile_frame` is called directly, not through the hook that torch.compile puts on frames: calls
are then covered under any dispatch mode and in any thread, no recompile limit counts them, and
settings hold for one trace alone.
"""

import ast
import builtins
import contextlib
import operator
import os
import random
import re
import sys
import types
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import fx

from rekindle.torch_compat.dynamo_answers import Unguarded, asked
from rekindle.torch_compat.dynamo_repeats import repeated
from rekindle.torch_compat.dynamo_thrift import thrift
from rekindle.torch_compat.prepared import Prepared
from rekindle.torch_compat.repeated_blocks import LOCAL, Repeats
from rekindle.torch_compat.running import outside_modes
from rekindle.torch_compat.symbols import sizes_marked, symbols_go_on, tracing_symbols

_TORCH_DIR = str(Path(torch.__file__).parent)


def is_saved_region(target: object) -> bool:
    """The op that Dynamo puts in the place of torch.utils.checkpoint."""
    return target is torch.ops.higher_order.tag_activation_checkpoint


class GraphBreak(Exception):
    """A call that Dynamo cannot read whole: why, and the line of the model where it stopped."""

    def __init__(self, why: str, line: str, original: Exception, is_the_models: bool) -> None:
        super().__init__(why)
        self.why, self.line = why, line
        self.original = original  # the error behind it
        self.is_the_models = is_the_models  # eager would raise that error too


class GraphInput:
    """What enters the graph: the expression that Dynamo gives for it, and its value now. A tensor
    is not kept alive."""

    __slots__ = ("_value", "expression", "stand_in")

    def __init__(self, expression: str, value: Any, stand_in: Any = None) -> None:
        self.expression = expression
        # What Dynamo read it as: a tensor without data, or a symbolic size.
        self.stand_in = stand_in
        self._value = weakref.ref(value) if isinstance(value, torch.Tensor) else lambda: value

    @property
    def value(self) -> Any:
        """None of a tensor that is gone."""
        return self._value()


class CallGuards:
    """Whether a call is the one that was read."""

    __slots__ = (
        *("__weakref__", "_later", "_manager", "_prepared", "_repeats", "_surroundings"),
        "_unwatched",
    )

    def __init__(
        self,
        manager: Any,
        unwatched: list[str],
        surroundings: "_Surroundings",
        prepared: Prepared,
        repeats: Repeats,
        later: Any,
    ) -> None:
        self._manager = manager
        self._later = later  # the part that is about what the backward's Python reads, or None
        self._unwatched = unwatched
        self._surroundings = surroundings
        self._prepared = prepared
        self._repeats = repeats

    def check(self, scope: dict[str, Any]) -> bool:
        self._prepared.again()
        if self._unwatched or not self._surroundings.as_before():
            return False
        if torch._C._len_torch_dispatch_stack():
            # A mode changes what a guard sees of a tensor, and not what the call does.
            with outside_modes():
                return self._manager.check(scope) and self._repeats.check(scope)
        return self._manager.check(scope) and self._repeats.check(scope)

    @property
    def can_be_watched(self) -> bool:
        """Whether changes of those blocks can be seen."""
        return self._repeats.can_be_watched

    @property
    def num_repeated(self) -> int:
        """Blocks of the model that were not read themselves."""
        return self._repeats.num_blocks

    def failed(self, scope: dict[str, Any]) -> str | None:
        """The first guard that does not hold, as Dynamo writes it."""
        if self._unwatched:
            return f"{self._unwatched[0]} is alive"
        changed = self._surroundings.changed()
        if changed is not None:
            return f"{changed} as they were"
        return _first_failed(self._manager, scope) or self._repeats.different(scope)

    @property
    def has_later_reads(self) -> bool:
        """Whether Python code that runs in the backward reads something."""
        return self._later is not None

    def failed_later(self, scope: dict[str, Any]) -> str | None:
        """When the backward begins: the first guard on what its Python reads that does not hold."""
        return _first_failed(self._later, scope)


def _first_failed(manager: Any, scope: dict[str, Any]) -> str | None:
    with outside_modes():
        found = manager.check_verbose(scope)
    if found.result:
        return None
    return " ".join(str(part) for part in found.verbose_code_parts[:1])


_TRACKER = "torch.utils.module_tracker"
_METHODS = (types.FunctionType, property, staticmethod, classmethod)


# Settings that torch's C++ reads where it chooses which op an op becomes, such as attention's.
# (What an op does when it runs, the recorded op asks itself.)
_SETTINGS: tuple[Callable[[], Any], ...] = tuple(
    getattr(torch._C, name)
    for name in (
        "_get_flash_sdp_enabled",
        "_get_mem_efficient_sdp_enabled",
        "_get_math_sdp_enabled",
        "_get_cudnn_sdp_enabled",
        "_get_mkldnn_enabled",
        "_get_cudnn_enabled",
    )
    if hasattr(torch._C, name)
)


def _getter(names: list[str]) -> Callable[[Any], Any]:
    return operator.itemgetter(*names) if names else lambda _table: None


class _Surroundings:
    """What Dynamo reads and does not guard: hooks of all modules, what the classes of the modules
    define, modules that forward imports, the environment, and torch's choices of kernels."""

    __slots__ = ("_environment", "_expected", "_imported", "_tables")
    _HOOKS = tuple(
        table
        for name, table in sorted(vars(torch.nn.modules.module).items())
        if name.startswith("_global_") and isinstance(table, dict)
    )

    def __init__(self, forward: Any, unguarded: Unguarded) -> None:
        model = getattr(forward, "__self__", None)
        modules = model.modules() if isinstance(model, torch.nn.Module) else ()
        classes = {cls: None for m in modules for cls in type(m).__mro__}
        self._tables = []
        for cls in classes:
            table = vars(cls)
            own = not cls.__module__.startswith(("torch.", "builtins"))
            names = [n for n, v in table.items() if isinstance(v, _METHODS)] if own else []
            names += [n for n in ("forward", "__call__") if n in table and n not in names]
            if own or names:
                self._tables.append((table, own, _getter(names)))
        self._imported = unguarded.imported
        self._environment = unguarded.environment
        self._expected = self._now()

    def _now(self) -> tuple[Any, ...]:
        # Counters of operations follow modules by hooks that change nothing.
        hooks = [hook for table in self._HOOKS for hook in table.values()]
        return (
            [hook for hook in hooks if getattr(hook, "__module__", None) != _TRACKER],
            [(methods(table), own and len(table)) for table, own, methods in self._tables],
            [sys.modules.get(name) for name in self._imported],
            dict(os.environ) if self._environment else None,
            [setting() for setting in _SETTINGS],
        )

    _WORDS = (
        "the hooks of all modules are",
        "the methods of the classes are",
        "the modules that forward imports are",
        "the variables of os.environ are",
        "torch's choices of kernels (torch.backends) are",
    )

    def as_before(self) -> bool:
        try:
            return bool(self._now() == self._expected)
        except KeyError:  # a method that was taken away
            return False

    def changed(self) -> str | None:
        """What is no longer as it was, in words; None if nothing is."""
        try:
            pairs = zip(self._WORDS, self._now(), self._expected, strict=True)
            return next((words for words, now, then in pairs if now != then), None)
        except KeyError:
            return self._WORDS[1]


@dataclass(frozen=True, slots=True)
class Reading:
    """A call that was read."""

    graph: fx.GraphModule
    inputs: tuple[GraphInput, ...]  # as the graph's placeholders count them
    guards: CallGuards
    replay: Callable[[Callable[..., Any]], Callable[..., Any]]  # of what runs the graph
    # Aspects of inputs that were read and that no guard is about: (input, attribute, value).
    asked: tuple[tuple[int, str, Any], ...] = ()
    # Whether no two inputs may be one tensor, which Dynamo's own guards see for some of them.
    apart: bool = False
    # The tensors among the inputs, until the plan is made: some are nobody else's.
    held: list[Any] = field(default_factory=list)
    symbols: Any = None  # of sizes that change, where some were marked

    @property
    def is_there(self) -> bool:
        """Whether the inputs still are."""
        return all(given.value is not None for given in self.inputs)


# What each release leaves out by default, to check less at each call.
_STRICT = {
    "skip_nnmodule_hook_guards": False,
    "skip_no_tensor_aliasing_guards_on_parameters": False,
    "skip_tensor_guards_with_matching_dict_tags": False,
    "skip_guards_on_constant_func_defaults": False,
    "use_recursive_dict_tags_for_guards": False,
    "use_lamba_guard_for_object_aliasing": False,  # a call of Python for each
    "guard_nn_modules": True,
    "skip_fsdp_guards": False,
}
_AS_EAGER = {
    "trace_numpy": False,  # translated, its results have other last bits
    "use_numpy_random_stream": True,
    "capture_scalar_outputs": False,
    # `add_(x, alpha=a)` as `add_(x * a)` and its like: rounded once more than eager's kernel.
    "enable_dynamo_decompositions": False,
    "allow_rnn": True,
    "automatic_dynamic_shapes": False,
    "assume_static_by_default": True,
    "specialize_float": True,
    "specialize_int": True,
    "verbose": False,
    "suppress_errors": False,
}


def read_call(
    function: Callable[..., Any],
    scope: Mapping[str, Any],
    adapt: Callable[[], contextlib.AbstractContextManager[Unguarded]],
    marks: Sequence[tuple[torch.Tensor, Sequence[int]]] = (),
) -> Reading:
    """`function` called with `scope` as its arguments, as Dynamo reads it. `adapt` makes the
    changes to Dynamo that hold while it reads, and gives what was read and is not guarded.
    `marks`: dimensions of tensors whose sizes change."""
    if marks:  # numbers of a block that follow from sizes are symbols of that block's own reading
        return _read_call(function, scope, adapt, None, marks)
    reading = _read_call(function, scope, adapt, getattr(scope["forward"], "__self__", None))
    num_tensors = len({id(given.value) for given in reading.inputs})
    if reading.apart and (num_tensors < len(reading.inputs) or not reading.guards.can_be_watched):
        # A tensor of a block that was not read itself is read elsewhere as well, or what is in
        # such a block cannot be compared at each call.
        return _read_call(function, scope, adapt, None)
    return reading


def _read_call(
    function: Callable[..., Any],
    scope: Mapping[str, Any],
    adapt: Callable[[], contextlib.AbstractContextManager[Unguarded]],
    model: Any,
    marks: Sequence[tuple[torch.Tensor, Sequence[int]]] = (),
) -> Reading:
    """Blocks of `model` that are alike are read once."""
    import torch._dynamo as dynamo
    from torch._dynamo import convert_frame
    from torch._dynamo.exc import TorchDynamoException
    from torch._guards import CompileContext, compile_context

    code = function.__code__
    # Dynamo puts names of its own among the globals.
    known = function.__globals__
    namespace: dict[str, Any] = {"__builtins__": builtins, "__name__": function.__module__}
    namespace.update({name: known[name] for name in code.co_names if name in known})
    found: list[tuple[fx.GraphModule, tuple[GraphInput, ...], Any]] = []

    held: list[Any] = []

    def backend(graph: fx.GraphModule, _examples: Any) -> Any:
        found.append((graph, _inputs(graph.graph), tracing_symbols() if marks else None))
        held[:] = [given.value for given in found[-1][1]]
        return _placeholder

    config = dynamo.config
    settings = {k: v for k, v in {**_STRICT, **_AS_EAGER}.items() if k in config._config}
    with contextlib.ExitStack() as stack:
        # The changes to Dynamo are the process's, while no other thread reads.
        stack.enter_context(convert_frame.compile_lock)
        stack.enter_context(_python_random_kept())
        stack.enter_context(_state_of_torch_guarded(convert_frame))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(config.patch(settings))
        stack.enter_context(thrift())
        stack.enter_context(sizes_marked(marks))
        unguarded = stack.enter_context(adapt())
        repeats = stack.enter_context(repeated(model, asked, unguarded))
        stack.enter_context(dynamo.utils.get_metrics_context())
        stack.enter_context(dynamo.utils.dynamo_timed("rekindle", log_pt2_compile_event=True))
        modes = getattr(convert_frame, "torch_function_mode_stack_state_mgr", None)
        if modes is not None:
            stack.enter_context(modes)
        stack.enter_context(compile_context(CompileContext(convert_frame.get_compile_id({}))))
        try:
            output = convert_frame.compile_frame(
                *(code, namespace, {**scope, LOCAL: None}, builtins.__dict__, ()),
                compiler_fn=backend,
                one_graph=True,
                restart_reasons=set(),
            )
        except TorchDynamoException as error:
            raise _graph_break(error) from error
        made = Repeats(repeats, scope, namespace)
        with contextlib.nullcontext() if modes is None else modes.temp_restore_stack():
            guards = _guards(
                code, output.tracer_output.output_graph, unguarded, scope["forward"], made
            )
    bytecode = output.bytecode
    if not found:
        empty = fx.GraphModule({}, _empty_graph())
        return Reading(empty, (), guards, lambda _run: made.given(bytecode, namespace))
    graph, inputs, symbols = found[-1]
    if symbols is not None:
        symbols_go_on(symbols)
    index = {given.expression: i for i, given in enumerate(inputs)}
    asked_of = tuple(
        (index[name], a, v) for (name, a), v in unguarded.aspects.items() if name in index
    )
    name = graph.meta.get("backend_id") or graph._backend_id

    def replay(run: Callable[..., Any]) -> Callable[..., Any]:
        return made.given(bytecode, {**namespace, name: run})

    return Reading(graph, inputs, guards, replay, asked_of, bool(made), held, symbols)


def _empty_graph() -> fx.Graph:
    graph = fx.Graph()
    graph.output(())
    return graph


def _placeholder(*_args: Any) -> Any:
    raise AssertionError("the graph of a call that was only read")


_placeholder._torchdynamo_disable = True  # type: ignore[attr-defined]


def _inputs(graph: fx.Graph) -> tuple[GraphInput, ...]:
    found = []
    for node in graph.nodes:
        if node.op == "placeholder":
            argument = node.meta["grapharg"]
            name = argument.source.name
            expression = name() if callable(name) else name
            found.append(GraphInput(expression, argument.example, node.meta.get("example_value")))
    return tuple(found)


def _guards(
    code: types.CodeType,
    output_graph: Any,
    unguarded: Unguarded,
    forward: Any,
    repeats: Repeats,
) -> CallGuards:
    from torch._dynamo.guards import CheckFunctionManager

    unwatched: list[str] = []

    class Manager(CheckFunctionManager):  # type: ignore[misc]
        """An object that is guarded by its identity and was freed: another may get its address."""

        def id_ref(self, obj: object, obj_str: str) -> int:
            with contextlib.suppress(TypeError):
                if id(obj) not in self._weakrefs:
                    self._weakrefs[id(obj)] = weakref.ref(obj)
                    weakref.finalize(obj, unwatched.append, obj_str).atexit = False
            return id(obj)

    manager = Manager(code, output_graph).guard_manager
    later = None
    if unguarded.later:
        later = Manager(code, output_graph, guard_filter_fn=unguarded.later.kept).guard_manager
    surroundings = _Surroundings(forward, unguarded)
    return CallGuards(manager, unwatched, surroundings, unguarded.prepared, repeats, later)


@contextlib.contextmanager
def _state_of_torch_guarded(convert_frame: Any) -> Iterator[None]:
    """The guard on the grad mode and its like is about the state now, not at an earlier trace."""
    saved = convert_frame.initial_global_state
    convert_frame.initial_global_state = torch._C._dynamo.guards.GlobalStateGuard()
    try:
        yield
    finally:
        convert_frame.initial_global_state = saved


@contextlib.contextmanager
def _python_random_kept() -> Iterator[None]:
    state = random.getstate()
    try:
        yield
    finally:
        random.setstate(state)


def _graph_break(error: Exception) -> GraphBreak:
    from torch._dynamo.exc import TorchRuntimeError

    text = str(getattr(error, "msg", None) or error)
    lines = [line.strip() for line in text.splitlines()]
    why = lines[0]
    # Where the model raises, the context has its error; else the explanation says more.
    label = "Developer debug context: " if why == "Observed exception" else "Explanation: "
    told = [line.removeprefix(label) for line in lines if line.startswith(label)]
    if told:
        why = f"{why}: {told[0]}"
    stack = list(getattr(error, "real_stack", None) or ())
    outside = [frame for frame in stack if not frame.filename.startswith(_TORCH_DIR)]
    frame = (outside or stack or [None])[-1]
    line = f"{frame.filename}:{frame.lineno}" if frame is not None else ""
    if stack and frame is not stack[-1]:  # what of torch the model called there
        why = f"in {stack[stack.index(frame) + 1].name}: {why}"
    original = error.__cause__
    if isinstance(error, TorchRuntimeError) and isinstance(original, Exception):
        return GraphBreak(why, line, original, True)
    raised = _RAISED.search(why)
    if raised is not None:
        kind = getattr(builtins, raised[1], None)
        if isinstance(kind, type) and issubclass(kind, Exception):
            with contextlib.suppress(ValueError, SyntaxError, TypeError):
                return GraphBreak(why, line, kind(*ast.literal_eval(f"({raised[2]},)")), True)
    return GraphBreak(why, line, error, False)


# How Dynamo tells of an error that the model itself raises, and nothing in it handles.
_RAISED = re.compile(r"Observed exception: raised exception (\w+)\((.*)\)$")
