"""What is different while code runs: keys of the dispatcher, modes, functions that stand in."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils.checkpoint

from rekindle.errors import RekindleError
from rekindle.supported_torch import tested


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


class as_eager_calls:
    """Inside `eager_kernels`: Python code that runs as it does in eager's backward, without a graph
    and with all of the dispatcher."""

    __slots__ = ("_grad", "_guard")

    def __enter__(self) -> None:
        excluded = torch._C._dispatch_tls_local_exclude_set()
        for key in _BELOW_AUTOGRAD:
            excluded = excluded.remove(key)
        included = torch._C._dispatch_tls_local_include_set()
        self._guard = torch._C._ForceDispatchKeyGuard(included, excluded)
        self._guard.__enter__()
        self._grad = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)

    def __exit__(self, *error: object) -> None:
        torch._C._set_grad_enabled(self._grad)
        self._guard.__exit__(*error)


# What `_AutoDispatchBelowAutograd` steps over.
_BELOW_AUTOGRAD = tuple(
    getattr(torch._C.DispatchKey, name)
    for name in ("AutogradFunctionality", "AutogradOther", "AutogradNestedTensor")
    if hasattr(torch._C.DispatchKey, name)
)


@functools.cache
def _generator_name() -> str:
    """What `checkpoint(..., use_reentrant=False)` runs a region by."""
    # torch 2.14 gave it another name, and kept a function under the old one that nothing calls: to
    # replace that has no effect, and the backward would record the regions' second runs.
    names = (
        "_checkpoint_without_reentrant_generator_impl",  # since 2.14
        "_checkpoint_without_reentrant_generator",
    )
    found = [name for name in names if hasattr(torch.utils.checkpoint, name)]
    if not found:
        raise RekindleError(
            f"torch {torch.__version__} runs torch.utils.checkpoint in another way than the tested "
            f"releases ({tested()}); install one of those"
        )
    return found[0]


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

    names = {"CheckpointFunction": Plain, _generator_name(): plain_generator}
    saved = {name: getattr(module, name) for name in names}
    for name, plain in names.items():
        setattr(module, name, plain)
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
    # Filled when torch was imported: it does not see what is put into torch._VF.
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


def transform_around() -> str:
    """What transforms the call that runs now (torch.func, forward-mode AD); nothing, usually."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "a transform of torch.func is around it"
    if torch.autograd.forward_ad._current_level >= 0:
        return "forward-mode AD is on"
    return ""
