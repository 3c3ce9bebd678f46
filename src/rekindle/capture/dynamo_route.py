"""The second route to the forward: Dynamo reads the model's Python, and the graph of torch calls
that it finds runs under the same recorder.

Where the model's own code cannot run on fake tensors (it insists on `type(x) is Tensor`,
or reaches a parameter through a closure), reading it may still work. The guarantees are those of
the direct route. Code that asks hears that it is not being compiled. numpy is not translated: its
results have other last bits. Numbers that Python reads from data are answered and guarded by the
recorder. And the recorded forward is used only after it has run for real on the sample and
has given eager's outputs, buffers and random stream, bit by bit.
"""

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn

from rekindle.capture.recorder import Recorder
from rekindle.errors import CaptureError
from rekindle.torch_compat import is_saved_region, read_whole

_LINE = re.compile(r'File "([^"]+)", line (\d+)')
_WORD = re.compile(r"\w+")


def run_read(
    call: Callable[..., Any],
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    recorder: Recorder,
    fakes: dict[int, torch.Tensor],
) -> Any:
    """`call(model, *args, **kwargs)` as Dynamo reads it, on the fakes of its tensors; inside, the
    model has its real parameters."""
    names = {name for name, _ in model.named_modules()}

    def run_graph(graph: fx.GraphModule, tensors: tuple[Any, ...]) -> Any:
        stand_ins = [fakes.get(id(t), t) for t in tensors]
        with recorder.fake_mode, recorder:
            return _Replay(graph, recorder, names).run(*stand_ins)

    compiling, out = read_whole(_asked, run_graph)(call, model, args, kwargs)
    if compiling:
        raise CaptureError("the model would believe that it is being compiled")
    return out


def _asked(call: Any, model: Any, args: Any, kwargs: Any) -> Any:
    return torch.compiler.is_compiling(), call(model, *args, **kwargs)


class _Replay(fx.Interpreter):  # type: ignore[misc]
    """Runs the graph with the recorder told of each call's module and source line."""

    def __init__(self, graph: fx.GraphModule, recorder: Recorder, names: set[str]) -> None:
        super().__init__(graph)
        self.recorder = recorder
        self.names = names

    def run(self, *args: Any, **kwargs: Any) -> Any:
        self.recorder.module_path.append("")
        try:
            return super().run(*args, **kwargs)
        finally:
            self.recorder.module_path.pop()
            self.recorder.line = ""

    def run_node(self, node: fx.Node) -> Any:
        self.recorder.module_path[-1] = self._path(node)
        lines = _LINE.findall(node.meta.get("stack_trace") or "")
        if lines:
            self.recorder.line = ":".join(lines[-1])
        return super().run_node(node)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if is_saved_region(target):  # the schedule decides what is kept
            region, *given = args
            return _Replay(region, self.recorder, self.names).run(*given)
        return super().call_function(target, args, kwargs)

    def _path(self, node: fx.Node) -> str:
        """The module's name out of Dynamo's expression for it, such as L['model'].blocks[0]."""
        stack = node.meta.get("nn_module_stack") or {}
        for expression, _ in reversed(list(stack.values())):
            steps = [s for s in _WORD.findall(expression) if s != "_modules"]
            for start in range(len(steps)):
                name = ".".join(steps[start:])
                if name in self.names:
                    return name
        return ""
