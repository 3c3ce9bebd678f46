"""The only file that touches private torch API, for torch 2.11 to 2.13.

Each name here is what the rest of the house may use; where a release lacks a piece, the fallback
stands beside it.
"""

import rekindle.supported_torch  # noqa: F401 (first: it refuses releases that are not supported)

# isort: split
import contextlib
import ctypes
import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.utils.checkpoint
from torch import fx
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
    _BypassDispatchCache,
    _CacheKeyState,
)
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [  # torch's own, handed on as they are
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "TorchDispatchMode",
    "pytree",
]

nn_functions = torch._C._nn  # ops that Python binds in a place of their own, such as gelu
UNSUPPORTED = (UnsupportedFakeTensorException, UnsupportedOperatorException)


# ---- storages and references


def storage_key(tensor: torch.Tensor) -> int:
    """Equal for two tensors if and only if they share a storage (while both are alive)."""
    return int(tensor.untyped_storage()._cdata)


def python_references(tensor: torch.Tensor) -> int:
    """How often Python refers to a tensor, as a number to compare with another tensor's: what C++
    holds (a view its base, a node what it saved) may count as one reference, and is left out."""
    return sys.getrefcount(tensor) - (_counts_cpp() if tensor._use_count() > 1 else 0)


@functools.cache
def _counts_cpp() -> int:
    """What all holders in C++ together add to a tensor's count of references: 0 or 1."""
    tensor = torch.empty(0)
    alone = sys.getrefcount(tensor)
    view = tensor.view(0)
    return sys.getrefcount(tensor) - alone if view._is_view() else 0


def storage_bytes(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage().nbytes())


def borrowed(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor over the same memory that does not keep it: valid as long as nobody else gets it."""
    storage = tensor.untyped_storage()
    place = torch._C._construct_storage_from_data_pointer(
        storage.data_ptr(), tensor.device, storage.nbytes()
    )
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(
        place, tensor.storage_offset(), tensor.shape, tensor.stride()
    )


# ---- the autograd graph


def forward_sequence_nr() -> int:
    """The number of the autograd node that the op being dispatched belongs to."""
    return int(torch.autograd._get_sequence_nr()) - 1


def backward_node() -> Any | None:
    """The autograd node whose backward is running in this thread, or None."""
    return torch._C._current_autograd_node()


def node_sequence_nr(node: Any) -> int:
    return int(node._sequence_nr())


def backward_keeps_graph() -> bool:
    """Inside a backward: whether the caller asked for retain_graph."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


# ---- ops and calls


def is_overload(target: object) -> bool:
    return isinstance(target, torch._ops.OpOverload)


def is_higher_order(target: object) -> bool:
    return isinstance(target, torch._ops.HigherOrderOperator)


def copy_all(into: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
    """Copies each into its place, many by one launch."""
    torch._foreach_copy_(list(into), list(tensors))


def add_call(
    graph: fx.Graph, op: str, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> fx.Node:
    """A call at the end of a graph. Its arguments are set afterwards: in those that it is made with
    torch 2.13 looks for symbols, which takes as long as the rest."""
    node = graph.create_node(op, target)
    node.args = args
    if kwargs:
        node.kwargs = kwargs
    return node


@functools.cache
def bare_call(target: Any) -> Any:
    """The overload without its Python wrapper, under a name that FX can print."""
    return named_call(target._op, str(target).replace(".", "_").replace("::", "_"))


def named_call(function: Callable[..., Any], name: str) -> Any:
    """A callable under a name that FX can print."""
    call = functools.partial(function)
    call.__name__ = call.__qualname__ = name  # type: ignore[attr-defined]
    call.__module__ = __name__
    return call


# ---- kernels of our own


@functools.cache
def _whole_numbers(num: int) -> Any:
    return ctypes.c_uint64 * num


class CudaKernel:
    """A kernel of this source. Its arguments are addresses and whole numbers of 64 bits; blocks
    have 256 threads, or as many as it is told. torch's own launch spends several times as long on
    the host."""

    num_threads = 256
    _NO_CONTEXT = 201

    def __init__(
        self, source: str, name: str, device: torch.device, num_threads: int = num_threads
    ) -> None:
        self.num_threads = num_threads
        index = device.index
        self.device: int = torch.cuda.current_device() if index is None else index
        with torch.cuda.device(self.device):
            self._kernel = torch.cuda._compile_kernel(source, name)  # keeps the module loaded
        self._launch = ctypes.CDLL("libcuda.so.1").cuLaunchKernel
        self._launch.argtypes = [ctypes.c_void_p, *[ctypes.c_uint] * 7, *[ctypes.c_void_p] * 3]

    def __call__(self, num_blocks: int, values: Sequence[int]) -> None:
        if torch._C._cuda_getDevice() != self.device:
            with torch.cuda.device(self.device):
                return self(num_blocks, values)
        array = _whole_numbers(len(values))
        slots = array(*values)
        first = ctypes.addressof(slots)
        places = array(*range(first, first + 8 * len(values), 8))
        stream = torch._C._cuda_getCurrentRawStream(self.device)
        grid = (num_blocks, 1, 1, self.num_threads, 1, 1, 0)
        error = self._launch(self._kernel.func, *grid, stream, ctypes.addressof(places), None)
        if error == self._NO_CONTEXT:  # the first that a thread does on this device
            torch._C._cuda_setDevice(self.device)
            error = self._launch(self._kernel.func, *grid, stream, ctypes.addressof(places), None)
        if error:
            raise RuntimeError(f"a kernel could not be launched: error {error} of the CUDA driver")
        return None


# ---- what is different while code runs


class eager_kernels:
    """Ops called inside run the kernels that eager runs, and nothing around them.

    Autograd is stepped over (the graph holds its ops already), and so is autocast (its casts stand
    in the graph). The grad mode is on, as it was when eager ran them: oneDNN's LSTM, for one, keeps
    what its backward needs only then.
    """

    __slots__ = ("_autocast", "_grad", "_guard")

    def __enter__(self) -> None:
        self._autocast = [d for d in ("cpu", "cuda") if torch.is_autocast_enabled(d)]
        for device in self._autocast:
            torch.set_autocast_enabled(device, False)
        self._grad = torch.is_grad_enabled()
        torch._C._set_grad_enabled(True)
        self._guard = torch._C._AutoDispatchBelowAutograd()

    def __exit__(self, *_: object) -> None:
        del self._guard
        torch._C._set_grad_enabled(self._grad)
        for device in self._autocast:
            torch.set_autocast_enabled(device, True)


@contextlib.contextmanager
def run_saved_regions_plainly() -> Iterator[None]:
    """torch.utils.checkpoint inside a model becomes plain code: the schedule decides what is kept,
    and a second, unseeded run of its random ops must not enter the graph."""
    module = torch.utils.checkpoint

    class Plain:
        @staticmethod
        def apply(function: Callable[..., Any], _preserve: bool, *args: Any) -> Any:
            # The reentrant variant gives no gradients at all unless a tensor argument asks.
            wants = any(isinstance(a, torch.Tensor) and a.requires_grad for a in args)
            with torch.set_grad_enabled(wants and torch.is_grad_enabled()):
                return function(*args)

    def plain_generator(*_args: Any, **_kwargs: Any) -> Iterator[None]:
        yield

    names = {
        "CheckpointFunction": Plain,
        "_checkpoint_without_reentrant_generator": plain_generator,
    }
    saved = {name: getattr(module, name) for name in names if hasattr(module, name)}
    for name in saved:
        setattr(module, name, names[name])
    try:
        yield
    finally:
        for name, value in saved.items():
            setattr(module, name, value)


@contextlib.contextmanager
def outside_modes() -> Iterator[None]:
    """Inside a dispatch mode: run as if no mode were on."""
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes():
        yield


@contextlib.contextmanager
def recurrent_layers_call(run: Callable[..., Any]) -> Iterator[None]:
    """Inside, nn.LSTM and its kin call `run(name, function, *args)` in the place of the function
    torch.lstm, torch.gru, torch.rnn_tanh or torch.rnn_relu."""
    from torch.nn.modules import rnn

    names = ("lstm", "gru", "rnn_tanh", "rnn_relu")
    others = {name: functools.partial(run, name, getattr(torch._VF, name)) for name in names}
    saved = {name: vars(torch._VF).get(name) for name in names}
    table = dict(rnn._rnn_impls)
    # A layer looks whether its weights lie in one block, by their addresses.
    flatten = torch.nn.RNNBase.flatten_parameters
    torch.nn.RNNBase.flatten_parameters = lambda self: None
    for name, function in others.items():
        setattr(torch._VF, name, function)
    rnn._rnn_impls.update({name: others[name.lower()] for name in table})
    try:
        yield
    finally:
        torch.nn.RNNBase.flatten_parameters = flatten
        rnn._rnn_impls.update(table)
        for name, function in saved.items():
            if function is None:
                delattr(torch._VF, name)
            else:
                setattr(torch._VF, name, function)


# ---- tensors without data (`capture.fakes`)


def new_fake_mode() -> FakeTensorMode:
    """A mode whose tensors refuse to tell an address instead of telling a wrong one."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    mode._allow_unsafe_data_ptr_access = False
    return mode


def filling_stand_in(mode: FakeTensorMode, real: torch.Tensor) -> FakeTensor | None:
    """What `mode.from_tensor` gives for a plain leaf that fills its storage, in a fraction of the
    time; None where another tensor of that storage came before."""
    converter = mode.fake_tensor_converter
    memo = converter.meta_converter.storage_memo
    storage_id = converter.meta_converter.describer.get_storage_id(real.untyped_storage())
    if storage_id in memo:
        return None
    with torch._C._DisableTorchDispatch():
        blank = torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device="meta")
        fake = FakeTensor(mode, blank, real.device)
    fake.requires_grad = real.requires_grad
    if isinstance(real, torch.nn.Parameter):
        fake._is_param = True
    memo[storage_id] = fake.untyped_storage()
    converter.set_tensor_memo(real, fake)
    return fake


_FAKE = torch._C._TorchDispatchModeKey.FAKE
DEVICE_OF = torch.ops.prim.device.default  # the engine asks for it several times per op
default_device = torch._C._get_default_device


def run_below(mode: FakeTensorMode, run: Callable[..., Any], *args: Any) -> Any:
    """`run(*args)` with the mode off, as the dispatcher calls a mode, where it is the only one that
    is on; NotImplemented elsewhere."""
    found = torch._C._unset_dispatch_mode(_FAKE)
    try:
        if found is mode and not torch._C._len_torch_dispatch_stack():
            return run(*args)
        return NotImplemented
    finally:
        if found is not None:
            torch._C._set_dispatch_mode(found)


class KeptAnswers:
    """What a fake mode keeps of the answers of its kernels: told by `ask`, given by `again`."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self.mode = mode
        self.usable = mode.cache_enabled and not mode.cache_crosscheck_enabled and _cache_is_known()
        self._state = _CacheKeyState(None)  # without symbols there is nothing in it

    def ask(
        self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Any]:
        """The answer of the mode; and what it keeps of it, or None."""
        try:
            key = self.mode._cache_key(_CacheKeyState(None), func, args, kwargs)
        except _BypassDispatchCache:
            key = None
        out = self.mode.dispatch(func, types, args, kwargs)
        entry = None if key is None else FakeTensorMode.cache.get(key)
        return out, (entry, key, _fresh(entry)) if hasattr(entry, "output_infos") else None

    def again(self, kept: Any, func: Any, args: tuple[Any, ...]) -> Any:
        """The answer once more, for arguments of the same kind."""
        entry, key, fresh = kept
        if fresh is None:
            return self.mode._output_from_cache_entry(self._state, entry, key, func, args)
        made = [
            m
            and FakeTensor(
                self.mode,
                torch.empty_strided(
                    m.shape, m.stride, dtype=m.dtype, device="meta", requires_grad=m.requires_grad
                ),
                m.device,
            )
            for m in fresh
        ]
        return tuple(made) if entry.is_output_tuple else made[0]


def _fresh(entry: Any) -> list[Any] | None:
    """What describes each output, None for one that is None, where all of them are new tensors:
    those are made here, without the guards that torch puts around the making of each."""
    found = []
    for info in entry.output_infos:
        m = info.metadata
        if info.inplace_idx is not None or info.view_idx is not None:
            return None
        if m is None:
            if not hasattr(info, "constant_value") or info.constant_value is not None:
                return None
        elif m.layout is not torch.strided or m.is_conj or m.is_neg:
            return None
        found.append(m)
    return found


@functools.cache
def _cache_is_known() -> bool:
    """Whether this release keeps answers in the form that is used here."""
    expected = {
        "_cache_key": ["self", "state", "func", "args", "kwargs"],
        "_output_from_cache_entry": ["self", "state", "entry", "key", "func", "args"],
    }
    return isinstance(getattr(FakeTensorMode, "cache", None), dict) and all(
        list(inspect.signature(getattr(FakeTensorMode, name, bool)).parameters) == parameters
        for name, parameters in expected.items()
    )


# ---- Dynamo


def is_saved_region(target: object) -> bool:
    """The op that Dynamo puts in the place of torch.utils.checkpoint."""
    return target is torch.ops.higher_order.tag_activation_checkpoint


@contextlib.contextmanager
def _not_compiling() -> Iterator[None]:
    """Code that Dynamo reads and that asks whether it is being compiled hears no."""
    from torch._dynamo.variables.torch import tracing_state_functions

    answers = tracing_state_functions()
    saved = dict(answers)
    answers.update({question: False for question, answer in saved.items() if answer is True})
    try:
        yield
    finally:
        answers.update(saved)


def read_whole(
    function: Callable[..., Any], run_graph: Callable[[fx.GraphModule, tuple[Any, ...]], Any]
) -> Callable[..., Any]:
    """`function` as Dynamo reads it, in one graph of torch calls that `run_graph` runs; raises
    where it cannot be read whole."""
    import torch._dynamo

    # Dynamo keeps what it has read by code object: one that nobody else has.
    fresh = types.FunctionType(function.__code__.replace(), function.__globals__)

    def backend(graph: fx.GraphModule, _examples: Any) -> Callable[..., Any]:
        return lambda *args: run_graph(graph, args)

    def call(*args: Any, **kwargs: Any) -> Any:
        settings = {"trace_numpy": False, "capture_scalar_outputs": True, "verbose": False}
        with _not_compiling(), torch._dynamo.config.patch(settings):
            read = torch.compile(fresh, backend=backend, fullgraph=True, dynamic=False)
            return read(*args, **kwargs)

    return call
