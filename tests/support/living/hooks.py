"""Hooks and patched methods (finding E9): added, removed, replaced, or changed."""

import types
from typing import Any

import torch
from support.living.cases import Living, case, restored
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks


class Scaled(nn.Module):
    """A submodule to hang hooks on."""

    def __init__(self, scale: float = 1.5) -> None:
        super().__init__()
        self.inner = nn.Linear(12, 12)
        self.scale = scale

    def forward(self, h: Tensor, shift: float = 0.0) -> Tensor:
        return torch.tanh(self.inner(h)) * self.scale + shift


class WithInner(Living):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Scaled()
        self.handle: Any = None
        self.prepare()

    def prepare(self) -> None:
        """Hooks that are there when the model is planned."""

    def middle(self, h: Tensor) -> Tensor:
        return self.inner(h, shift=0.5)


@case("e9")
class ForwardHookAdded(WithInner):
    def change(self) -> None:
        self.inner.register_forward_hook(lambda module, args, out: out * 2)


@case("e9")
class ForwardHookRemoved(WithInner):
    def prepare(self) -> None:
        self.handle = self.inner.register_forward_hook(lambda module, args, out: out * 2)

    def change(self) -> None:
        self.handle.remove()


@case("e9", quick=True)
class ForwardHookReplaced(ForwardHookRemoved):
    def change(self) -> None:
        self.handle.remove()
        self.inner.register_forward_hook(lambda module, args, out: out * 3)


@case("e9")
class ForwardHookReplacedInItsPlace(ForwardHookRemoved):
    """The same handle, another function: names and counts stay."""

    def change(self) -> None:
        self.inner._forward_hooks[self.handle.id] = lambda module, args, out: out * 3


@case("e9")
class ForwardPreHookReplaced(WithInner):
    def prepare(self) -> None:
        self.handle = self.inner.register_forward_pre_hook(lambda module, args: (args[0] * 2,))

    def change(self) -> None:
        self.handle.remove()
        self.inner.register_forward_pre_hook(lambda module, args: (args[0] * 3,))


@case("e9")
class HooksWithKwargs(WithInner):
    def prepare(self) -> None:
        def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
            return args, {"shift": kwargs["shift"] + 1}

        def after(module: nn.Module, args: Any, kwargs: Any, out: Tensor) -> Tensor:
            return out * kwargs["shift"]

        self.inner.register_forward_pre_hook(before, with_kwargs=True)
        self.handle = self.inner.register_forward_hook(after, with_kwargs=True)

    def change(self) -> None:
        self.handle.remove()
        self.inner.register_forward_hook(
            lambda module, args, kwargs, out: out - kwargs["shift"], with_kwargs=True
        )


class Gain:
    """A hook that reads a number of its own."""

    def __init__(self) -> None:
        self.gain = 2.0

    def __call__(self, module: nn.Module, args: Any, out: Tensor) -> Tensor:
        return out * self.gain


@case("e9")
class HookReadsItsObject(WithInner):
    def prepare(self) -> None:
        self.gain = Gain()
        self.inner.register_forward_hook(self.gain)

    def change(self) -> None:
        self.gain.gain = 0.5


@case("e9", shows=False)
class HookOnTheModelItself(WithInner):
    """A managed model has a table of hooks of its own, to which a handle from before is no key."""

    def prepare(self) -> None:
        self.register_forward_hook(lambda module, args, out: out * 2)

    def change(self) -> None:
        self._forward_hooks.clear()
        self.register_forward_hook(lambda module, args, out: out - 1)


@case("e9", quick=True)
class BackwardHookReplaced(WithInner):
    def prepare(self) -> None:
        self.handle = self.inner.register_full_backward_hook(
            lambda module, got, given: (got[0] * 2,)
        )

    def change(self) -> None:
        self.handle.remove()
        self.inner.register_full_backward_hook(lambda module, got, given: (got[0] * 0.25,))


@case("e9")
class BackwardHookAdded(WithInner):
    def change(self) -> None:
        self.inner.register_full_backward_hook(lambda module, got, given: (got[0] * 0.25,))


@case("e9")
class BackwardPreHookReplaced(WithInner):
    def prepare(self) -> None:
        self.handle = self.inner.register_full_backward_pre_hook(
            lambda module, given: (given[0] * 2,)
        )

    def change(self) -> None:
        self.handle.remove()
        self.inner.register_full_backward_pre_hook(lambda module, given: (given[0] * 3,))


@case("e3")
class BackwardHookCollects(WithInner):
    """Gradient statistics, as users keep them."""

    def prepare(self) -> None:
        self.norms: list[Tensor] = []
        self.inner.register_full_backward_hook(
            lambda module, got, given: self.norms.append(given[0].norm())
        )

    def observed(self) -> Any:
        return self.norms


class HookEverywhere:
    def __init__(self, gain: float) -> None:
        self.gain = gain

    def __call__(self, module: nn.Module, args: Any, out: Any) -> Any:
        return out * self.gain if isinstance(module, Scaled) else None


@case("e9")
class HookOfAllModules(WithInner):
    def prepare(self) -> None:
        self.handle = nn.modules.module.register_module_forward_hook(HookEverywhere(2.0))

    def change(self) -> None:
        self.handle.remove()
        self.handle = nn.modules.module.register_module_forward_hook(HookEverywhere(3.0))

    def leave(self) -> None:
        restored(module_hooks._global_forward_hooks, {})


@case("e9")
class HookOfAllModulesAdded(HookOfAllModules):
    def prepare(self) -> None:
        pass

    def change(self) -> None:
        nn.modules.module.register_module_forward_hook(HookEverywhere(3.0))


@case("e9")
class HookOnAParameter(Living):
    def before(self, step: int) -> None:
        if step == 1:
            self.handle = self.first.weight.register_hook(lambda grad: grad * 2)
        elif step == 2:
            self.handle.remove()
            self.first.weight.register_hook(lambda grad: grad.clamp(-0.01, 0.01))


@case("e9")
class HookAfterAccumulation(Living):
    """The optimizer inside of the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[Tensor] = []

    def change(self) -> None:
        def step(parameter: Tensor) -> None:
            self.given.append(parameter.grad.clone())
            parameter.grad = None

        for parameter in self.parameters():
            parameter.register_post_accumulate_grad_hook(step)

    def observed(self) -> Any:
        return sorted(float(g.sum()) for g in self.given)


@case("e9", quick=True)
class SubmoduleForwardPatched(WithInner):
    def change(self) -> None:
        inner = self.inner
        original = inner.forward
        inner.forward = lambda h, shift=0.0: original(h, shift) * 3


@case("e9")
class SubmoduleForwardBoundAnew(WithInner):
    def change(self) -> None:
        def forward(self: Any, h: Tensor, shift: float = 0.0) -> Tensor:
            return torch.relu(self.inner(h)) - shift

        self.inner.forward = types.MethodType(forward, self.inner)


@case("e9")
class PatchTakenBack(WithInner):
    def prepare(self) -> None:
        self.inner.forward = lambda h, shift=0.0: torch.relu(self.inner.inner(h))

    def change(self) -> None:
        del self.inner.forward


@case("e9", quick=True)
class ClassForwardPatched(WithInner):
    """A library that patches a class when it is told to, as kernels for transformers do."""

    original = Scaled.forward

    def change(self) -> None:
        Scaled.forward = lambda self, h, shift=0.0: torch.relu(self.inner(h)) * self.scale

    def leave(self) -> None:
        Scaled.forward = ClassForwardPatched.original


class Shifted(Scaled):
    def forward(self, h: Tensor, shift: float = 0.0) -> Tensor:
        return torch.relu(self.inner(h)) - shift


@case("e9", quick=True)
class SubmoduleOfAnotherClass(WithInner):
    def change(self) -> None:
        self.inner.__class__ = Shifted


@case("e9")
class HelperMethodPatched(WithInner):
    def change(self) -> None:
        self.middle = lambda h: self.inner(h) * 3


@case("e9", shows=False)
class OwnForwardPatched(WithInner):
    """Whoever replaces the managed model's forward has the forward that he gave."""

    def change(self) -> None:
        self.forward = lambda x: self.second(torch.relu(self.first(x)))


@case("e9")
class FunctionOfTorchPatched(Living):
    original = staticmethod(nn.functional.softplus)

    def middle(self, h: Tensor) -> Tensor:
        return nn.functional.softplus(h)

    def change(self) -> None:
        nn.functional.softplus = lambda h: h * 3

    def leave(self) -> None:
        nn.functional.softplus = self.original


@case("e3")
class HookKeepsActivations(WithInner):
    """A dictionary of activations filled by hooks, as feature extractors do."""

    def prepare(self) -> None:
        self.features: dict[str, Tensor] = {}

        def keep(module: nn.Module, args: Any, out: Tensor) -> None:
            self.features["inner"] = out

        self.inner.register_forward_hook(keep)

    def loss(self, out: Tensor) -> Tensor:
        return out.square().mean() + self.features["inner"].abs().mean()

    def observed(self) -> Any:
        return {k: v.detach() for k, v in self.features.items()}
