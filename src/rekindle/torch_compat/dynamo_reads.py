"""What Dynamo reads otherwise than eager runs it, or not at all, where the recorder can follow."""

import contextlib
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from rekindle.torch_compat.dynamo_guards import install
from rekindle.torch_compat.dynamo_patches import changed


@contextlib.contextmanager
def read_as_eager_runs(module_hooks: Callable[..., Any]) -> Iterator[None]:
    """All of it. `module_hooks(module, hooks, pre_hooks)` makes what stands in the graph for the
    backward hooks of a module."""
    with (
        _own_code_read(),
        _generators_given(),
        _retained_gradients_followed(),
        _module_hooks_given(module_hooks),
        _requiring_followed(),
    ):
        yield


@contextlib.contextmanager
def _own_code_read() -> Iterator[None]:
    """Functions in whose place Dynamo was told to read others. Those of C have no code to read;
    for them, and for Python's own, the substitutes are torch's."""
    from torch._dynamo.variables.functions import PolyfilledFunctionVariable, UserFunctionVariable

    def change(read: Any) -> Any:
        def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
            torchs = str(self.traceable_fn.__module__).startswith("torch.")
            if torchs or not isinstance(self.fn, types.FunctionType):
                return read(self, tx, args, kwargs)
            own = UserFunctionVariable(self.fn, source=self.source)
            return own.call_function(tx, args, kwargs)

        return call_function

    with changed(PolyfilledFunctionVariable, "call_function", change):
        yield


@contextlib.contextmanager
def _generators_given() -> Iterator[None]:
    """A generator of random numbers becomes an attribute of the graph, guarded by its identity: the
    torch calls that are given it draw from the very same one."""
    from torch._dynamo.guards import GuardBuilder, install_guard
    from torch._dynamo.symbolic_convert import InstructionTranslator
    from torch._dynamo.variables import UserDefinedObjectVariable

    def change(read: Any) -> Any:
        def as_proxy(self: Any) -> Any:
            if not isinstance(self.value, torch.Generator) or self.source is None:
                return read(self)
            install_guard(self.source.make_guard(GuardBuilder.ID_MATCH))
            output = InstructionTranslator.current_tx().output
            name = f"generator_{id(self.value)}"
            output.nn_modules[name] = self.value
            proxy = output.create_proxy("get_attr", name, (), {})
            proxy.node.meta["example_value"] = self.value
            return proxy

        return as_proxy

    with changed(UserDefinedObjectVariable, "as_proxy", change):
        yield


@contextlib.contextmanager
def _retained_gradients_followed() -> Iterator[None]:
    """`retain_grad()` on what forward computes is a call of the graph: the recorder says whether
    anybody could see the gradient."""
    from torch._dynamo.variables import TensorVariable

    def change(read: Any) -> Any:
        def method_attr_retain_grad(self: Any, tx: Any) -> Any:
            return None if self.source is None else read(self, tx)

        return method_attr_retain_grad

    with changed(TensorVariable, "method_attr_retain_grad", change):
        yield


@contextlib.contextmanager
def _module_hooks_given(module_hooks: Callable[..., Any]) -> Iterator[None]:
    """The backward hooks of a module become an attribute of the graph. Dynamo would read them in
    the backward, with compiled autograd; here they are called then, and are guarded by which they
    are and whose."""
    from torch._dynamo.variables.distributed import BackwardHookVariable

    def create(tx: Any, module: Any, _hooks: Any, _pre_hooks: Any) -> Any:
        real = module.value
        given = module_hooks(real, real._get_backward_hooks()[0], real._get_backward_pre_hooks())
        install(module.source, given.are_those_of, "has the same backward hooks")
        name = f"module_hooks_{len(tx.output.nn_modules)}"
        tx.output.nn_modules[name] = given
        proxy = tx.output.create_proxy("get_attr", name, (), {})
        proxy.node.meta["example_value"] = torch.utils.hooks.BackwardHook(None, (), ())
        return BackwardHookVariable(proxy, module, _hooks, _pre_hooks)

    own = vars(BackwardHookVariable)["create"]
    BackwardHookVariable.create = staticmethod(create)
    try:
        yield
    finally:
        BackwardHookVariable.create = own


@contextlib.contextmanager
def _requiring_followed() -> Iterator[None]:
    """`requires_grad_()` on a tensor that is given becomes a call of the graph: who follows it
    says what is then to be done at each call."""
    from torch._dynamo.variables import TensorVariable

    def change(read: Any) -> Any:
        def method_requires_grad_(self: Any, tx: Any, requires_grad: Any = True) -> Any:
            wanted = requires_grad is True or requires_grad.as_python_constant() is True
            example = self.as_proxy().node.meta["example_value"]
            able = example.is_floating_point() and example.is_leaf and not example.requires_grad
            inside = len(tx.output.tracers) > 1  # of a part that may run another number of times
            if self.source is None or not wanted or not able or inside:
                return read(self, tx, requires_grad)
            tx.output.create_proxy("call_method", "requires_grad_", (self.as_proxy(),), {})
            example.requires_grad_()
            self.requires_grad = True
            return self

        return method_requires_grad_

    with changed(TensorVariable, "method_requires_grad_", change):
        yield
