"""Backward hooks of modules (`register_full_backward_hook`), as calls in the recorded backward.

A hook is Python that may do anything: it is called for real in each backward, once, where eager
would call it, and is never read or repeated. The graph goes on from copies of what it gives back,
so nothing is written over what it may have kept.
"""

import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import BackwardHook

from rekindle.errors import PlanMismatch
from rekindle.torch_compat import as_eager_calls

Gradients = Sequence[torch.Tensor | None]
Record = Callable[["ModuleHook", Gradients, Gradients | None], Gradients]


class ModuleHook:
    """The target of a call: one hook of one module. Both are held weakly, as the plan must not keep
    the model alive."""

    runs_once = True

    def __init__(self, module: nn.Module, hook: Callable[..., Any], before: bool) -> None:
        self.__name__ = "backward_pre_hook" if before else "backward_hook"
        self._module = weakref.ref(module)
        self._hook = _weakly(hook)

    @property
    def identity(self) -> "ModuleHook":
        """What tells it from other hooks: two are equal where the same hook of one module is meant,
        while both are alive."""
        return self

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ModuleHook) and other.is_now(self._module(), self._hook())

    def __hash__(self) -> int:
        return hash(self.__name__)

    def is_now(self, module: nn.Module | None, hook: Any) -> bool:
        """Whether this is the hook, of that module."""
        mine = self._hook()
        # A bound method is a new object each time that it is read.
        return mine is not None and mine == hook and self._module() is module is not None

    def __call__(self, gave: Gradients, got: Gradients | None) -> list[torch.Tensor | None]:
        """Copies of what the gradients `gave` become; `got` are those of the module's outputs, None
        for a hook that comes before the module's backward."""
        module, hook = self._module(), self._hook()
        if module is None or hook is None:
            raise PlanMismatch(
                "a backward hook was removed between the forward and the backward, and is gone; "
                "remove it after the backward"
            )
        with as_eager_calls():
            given = (tuple(gave),) if got is None else (tuple(gave), tuple(got))
            made = hook(module, *given)
        if made is None:
            made = gave
        elif isinstance(made, torch.Tensor):
            made = (made,)
        if len(made) != len(gave):
            raise RuntimeError(
                f"{self.__name__} of {type(module).__name__} returned {len(made)} gradients, "
                f"expected {len(gave)}"
            )
        return [_laid_out(m, g) for m, g in zip(made, gave, strict=True)]


def _weakly(hook: Callable[..., Any]) -> Callable[[], Any]:
    if isinstance(hook, types.MethodType):
        return weakref.WeakMethod(hook)
    try:
        return weakref.ref(hook)
    except TypeError:  # some callables of C
        return lambda: hook


def _laid_out(made: Any, like: torch.Tensor | None) -> torch.Tensor | None:
    """A copy of a gradient in the layout of the one that the plan counts on."""
    if like is None:
        if made is not None:
            raise PlanMismatch(
                "a backward hook returned a gradient for an input that requires none; return None "
                "for it"
            )
        return None
    if made is None or made.shape != like.shape or made.dtype != like.dtype:
        shown = "None" if made is None else f"{list(made.shape)} of {made.dtype}"
        raise PlanMismatch(
            f"a backward hook returned {shown} as the gradient {list(like.shape)} of {like.dtype}, "
            "which no plan can go on with; call the original model for this step"
        )
    return empty_like(like).copy_(made)


def empty_like(like: torch.Tensor) -> torch.Tensor:
    """A new tensor in the same layout; one in which elements share memory becomes a dense one."""
    if any(
        stride == 0 and size > 1 for size, stride in zip(like.shape, like.stride(), strict=True)
    ):
        return torch.empty(like.shape, dtype=like.dtype, device=like.device)
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)


class ModuleHooks:
    """What stands in the graph of a call for the hooks of one call of a module. `record` is set by
    who follows that graph."""

    def __init__(self, module: nn.Module, hooks: Sequence[Any], pre_hooks: Sequence[Any]) -> None:
        self._module = weakref.ref(module)
        self._hooks = [ModuleHook(module, hook, False) for hook in hooks]
        self._pre_hooks = [ModuleHook(module, hook, True) for hook in pre_hooks]
        self.record: Record | None = None
        self._torchs: BackwardHook | None = None

    def are_those_of(self, module: Any) -> bool:
        """Whether it is this module, and has these hooks still, in their order."""
        hooks = module._get_backward_hooks()[0], module._get_backward_pre_hooks()
        return (
            all(
                len(mine) == len(now)
                and all(m.is_now(module, h) for m, h in zip(mine, now, strict=True))
                for mine, now in zip((self._hooks, self._pre_hooks), hooks, strict=True)
            )
            and self._module() is module
        )

    def setup_input_hook(self, args: Any) -> Any:
        """Begins with a call of the module, as torch does."""
        record = self.record
        assert record is not None

        def after(hook: ModuleHook) -> Callable[..., Any]:
            return lambda _module, gave, got: tuple(record(hook, gave, got))

        def before(hook: ModuleHook) -> Callable[..., Any]:
            return lambda _module, got: tuple(record(hook, got, None))

        self._torchs = BackwardHook(
            None, [after(h) for h in self._hooks], [before(h) for h in self._pre_hooks]
        )
        return self._torchs.setup_input_hook(args)

    def setup_output_hook(self, result: Any) -> Any:
        """Ends with a call of the module."""
        assert self._torchs is not None
        return self._torchs.setup_output_hook(result)
