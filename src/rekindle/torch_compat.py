"""The only file that touches private torch API, for torch 2.11 to 2.13.

Each name here is what the rest of the house may use; where a release lacks a piece, the fallback
stands beside it.
"""

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

__all__ = [
    "UNSUPPORTED",
    "CudaKernel",
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "TorchDispatchMode",
    "add_call",
    "autocast_state",
    "backward_keeps_graph",
    "backward_node",
    "bare_call",
    "borrowed",
    "copy_all",
    "eager_kernels",
    "forward_sequence_nr",
    "is_overload",
    "named_call",
    "nn_functions",
    "pytree",
    "run_saved_regions_plainly",
    "storage_key",
]


nn_functions = torch._C._nn  # ops that Python binds in a place of their own, such as gelu
UNSUPPORTED = (UnsupportedFakeTensorException, UnsupportedOperatorException)


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


def copy_all(into: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
    """Copies each into its place, many by one launch."""
    torch._foreach_copy_(list(into), list(tensors))


def is_overload(target: object) -> bool:
    return isinstance(target, torch._ops.OpOverload)


def is_higher_order(target: object) -> bool:
    return isinstance(target, torch._ops.HigherOrderOperator)


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


def backward_creates_graph() -> bool:
    """Inside a backward of an autograd Function: whether the caller asked for create_graph."""
    return bool(torch.is_grad_enabled())


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


@functools.cache
def _whole_numbers(num: int) -> Any:
    return ctypes.c_uint64 * num


class CudaKernel:
    """A kernel of this source. Its arguments are addresses and whole numbers of 64 bits; blocks
    have 256 threads. torch's own launch spends several times as long on the host."""

    num_threads = 256
    _NO_CONTEXT = 201

    def __init__(self, source: str, name: str, device: torch.device) -> None:
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


def named_call(function: Callable[..., Any], name: str) -> Any:
    """A callable under a name that FX can print."""
    call = functools.partial(function)
    call.__name__ = call.__qualname__ = name  # type: ignore[attr-defined]
    call.__module__ = __name__
    return call


def autocast_state() -> tuple[Any, ...]:
    """What autocast would do to ops now: part of a call's signature."""
    return tuple(
        [
            (device, torch.get_autocast_dtype(device))
            for device in ("cpu", "cuda")
            if torch.is_autocast_enabled(device)
        ]
    )


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
def autocast_as(state: tuple[Any, ...]) -> Iterator[None]:
    """Autocast as `autocast_state` has told it; what it cached inside is gone afterwards."""
    wanted = dict(state)
    now = {d: (torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")}
    for device in now:
        torch.set_autocast_enabled(device, device in wanted)
        if device in wanted:
            torch.set_autocast_dtype(device, wanted[device])
    try:
        yield
    finally:
        if wanted:
            torch.clear_autocast_cache()
        for device, (enabled, dtype) in now.items():
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)


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
def libraries_see_real_tensors() -> Iterator[None]:
    """Libraries that take another path for tensors without data are told that these have some:
    transformers builds an explicit attention mask, and loses the fused kernel, where it sees a
    fake tensor."""
    module = sys.modules.get("transformers.utils.import_utils")
    saved = getattr(module, "is_fake_tensor", None)
    if saved is not None:
        module.is_fake_tensor = lambda _tensor: False  # type: ignore[union-attr]
    try:
        yield
    finally:
        if saved is not None:
            module.is_fake_tensor = saved  # type: ignore[union-attr]


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


@contextlib.contextmanager
def fake_tensors_answer(numpy: Callable[[torch.Tensor], Any]) -> Iterator[None]:
    """`.numpy()` of a fake tensor is answered by this function inside."""

    def answer(self: torch.Tensor, *, force: bool = False) -> Any:
        return numpy(self.detach() if force else self)

    FakeTensor.numpy = answer
    try:
        yield
    finally:
        del FakeTensor.numpy


def new_fake_mode() -> FakeTensorMode:
    """A mode whose tensors refuse to tell an address instead of telling a wrong one."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    mode._allow_unsafe_data_ptr_access = False
    return mode


def stand_in(mode: FakeTensorMode, real: torch.Tensor) -> FakeTensor:
    """What `mode.from_tensor` gives for a leaf. Most fill a storage of their own, and for those
    torch's converter, which is ready for anything, takes several times as long as this."""
    converter = mode.fake_tensor_converter
    memo = converter.meta_converter.storage_memo
    if not _fills_storage(real):
        return mode.from_tensor(real, static_shapes=True)
    storage_id = converter.meta_converter.describer.get_storage_id(real.untyped_storage())
    if storage_id in memo:  # another tensor of the same storage came before
        return mode.from_tensor(real, static_shapes=True)
    with torch._C._DisableTorchDispatch():
        blank = torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device="meta")
        fake = FakeTensor(mode, blank, real.device)
    fake.requires_grad = real.requires_grad
    if isinstance(real, torch.nn.Parameter):
        fake._is_param = True
    memo[storage_id] = fake.untyped_storage()
    converter.set_tensor_memo(real, fake)
    return fake


def _fills_storage(real: torch.Tensor) -> bool:
    plain = type(real) in (torch.Tensor, torch.nn.Parameter) and not hasattr(real, "_is_buffer")
    if not plain or real.layout is not torch.strided or real.is_quantized:
        return False
    if real._is_view() or real.is_conj() or real.is_neg() or real.is_inference():
        return False
    if not real.is_leaf or not real.is_contiguous() or real.storage_offset():
        return False
    if real.requires_grad and (
        real.grad is not None or getattr(real, "grad_dtype", real.dtype) != real.dtype
    ):
        return False
    return bool(real.untyped_storage().nbytes() == real.numel() * real.dtype.itemsize)


_FAKE = torch._C._TorchDispatchModeKey.FAKE
DEVICE_OF = torch.ops.prim.device.default  # the engine asks for it several times per op


class FakeRuns:
    """Ops on the tensors of one fake mode, called while it is on.

    A call goes to the mode's own method where no other mode could take part: the dispatcher's way
    there costs as much again. torch keeps the answers of its fake kernels under a key that takes
    longer to write than the answer to make; a shorter one, valid for this mode, leads to them here.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        self.mode = mode
        self._known: dict[Any, Any] = {}  # short key -> torch's entry and key, or None
        self._state = _CacheKeyState(None)  # without symbols there is nothing in it
        self._short = mode.cache_enabled and not mode.cache_crosscheck_enabled and _cache_is_known()

    def __call__(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        found = torch._C._unset_dispatch_mode(_FAKE)
        out = NotImplemented
        try:
            if found is self.mode and not torch._C._len_torch_dispatch_stack():
                out = self._run(func, types, args, kwargs)
        finally:
            if found is not None:
                torch._C._set_dispatch_mode(found)
        return func(*args, **kwargs) if out is NotImplemented else out

    def _run(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._short:
            return self.mode.dispatch(func, types, args, kwargs)
        if func is torch.ops.aten._unsafe_view.default:
            func = torch.ops.aten.view.default  # the same below autograd; torch keeps only this one
        key = self._key(func, args, kwargs)
        known = _MISSING if key is None else self._known.get(key, _MISSING)
        if known is None or key is None:
            return self.mode.dispatch(func, types, args, kwargs)
        if known is _MISSING:
            return self._learn(key, func, types, args, kwargs)
        entry, long_key, fresh = known
        if fresh is None:
            return self.mode._output_from_cache_entry(self._state, entry, long_key, func, args)
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

    def _key(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the mode's own key tells, shorter; None where it would keep nothing."""
        device = torch._C._get_default_device()
        settings = (torch.get_default_dtype(), device, torch.is_inference_mode_enabled())
        try:
            return (func, settings, self._part(args), self._part(kwargs))
        except _NoKey:
            return None

    def _learn(
        self, key: Any, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The answer of the mode; where it keeps that, the next call of this kind will find it."""
        try:
            long_key = self.mode._cache_key(_CacheKeyState(None), func, args, kwargs)
        except _BypassDispatchCache:
            long_key = None
        out = self.mode.dispatch(func, types, args, kwargs)
        entry = None if long_key is None else FakeTensorMode.cache.get(long_key)
        known = hasattr(entry, "output_infos")
        self._known[key] = (entry, long_key, _fresh(entry)) if known else None
        return out

    def _part(self, arg: Any) -> Any:
        kind = type(arg)
        if kind is FakeTensor:
            if arg.fake_mode is not self.mode or arg.constant is not None:
                raise _NoKey
            if arg.layout is not torch.strided or arg.is_quantized:
                raise _NoKey
            return (
                *(arg.shape, arg.stride(), arg.storage_offset(), arg.dtype, arg.fake_device),
                *(arg.untyped_storage().nbytes(), arg.requires_grad, arg.is_conj(), arg.is_neg()),
                arg.is_inference(),
            )
        if kind is tuple or kind is list:
            return (kind, *[self._part(a) for a in arg])
        if kind is dict:
            return (kind, *[(k, self._part(a)) for k, a in arg.items()])
        if kind in _PLAIN:
            return (kind, arg)  # 1, 1.0 and True are equal to Python and not to an op
        raise _NoKey


def _fresh(entry: Any) -> list[Any] | None:
    """What describes each output, None for one that is None, where all of them are new tensors:
    those are made here, without the guards that torch puts around the making of each."""
    found = []
    for info in entry.output_infos:
        m = info.metadata
        if info.inplace_idx is not None or info.view_idx is not None:
            return None
        if m is None:
            if getattr(info, "constant_value", _MISSING) is not None:
                return None
        elif m.layout is not torch.strided or m.is_conj or m.is_neg:
            return None
        found.append(m)
    return found


class _NoKey(Exception):
    pass


_MISSING: Any = object()


_PLAIN = frozenset(
    {
        *(type(None), bool, int, float, complex, str),
        *(torch.dtype, torch.device, torch.layout, torch.memory_format),
    }
)


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
