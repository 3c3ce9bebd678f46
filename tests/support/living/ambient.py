"""What surrounds a call: modes, threads, torch's settings, other users of Dynamo."""

import threading
from typing import Any

import torch
from support.living.cases import Living, Note, case, data
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode


class Dropping(Living):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.3)

    def middle(self, h: Tensor) -> Tensor:
        return self.drop(torch.sin(h))


@case(quick=True)
class FlopsCountedOnce(Dropping):
    """One call under a dispatch mode, then without it."""

    def __init__(self) -> None:
        super().__init__()
        self.flops: list[int] = []
        self.counts = False

    def before(self, step: int) -> None:
        self.counts = step == 1

    def train_step(self, note: Note, args: Any, kwargs: Any) -> None:
        if not self.counts:
            return super().train_step(note, args, kwargs)
        with FlopCounterMode(display=False):
            super().train_step(note, args, kwargs)
        return None


class Seen(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@case()
class FunctionModeAround(Dropping):
    asked = False

    def change(self) -> None:
        self.asked = True

    def train_step(self, note: Note, args: Any, kwargs: Any) -> None:
        if not self.asked:
            return super().train_step(note, args, kwargs)
        with Seen():
            super().train_step(note, args, kwargs)
        return None


class Halves(TorchFunctionMode):
    """A mode that changes results, as quantization simulators do."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out * 0.5 if func is torch.sin else out


@case("e4", breaks=True)
class FunctionModeThatChanges(FunctionModeAround):
    def train_step(self, note: Note, args: Any, kwargs: Any) -> None:
        if not self.asked:
            return Living.train_step(self, note, args, kwargs)
        with Halves():
            Living.train_step(self, note, args, kwargs)
        return None


@case(quick=True)
class DynamoReset(Dropping):
    def change(self) -> None:
        torch._dynamo.reset()


@case(shows=False, quick=True)
class ForwardCalledDirectly(Dropping):
    """`model.forward(...)` runs the plan, and no hooks of the model itself."""

    def __init__(self) -> None:
        super().__init__()
        self.register_forward_hook(lambda module, args, out: out * 2)

    def train_step(self, note: Note, args: Any, kwargs: Any) -> None:
        out = self.forward(*args, **kwargs) if self.direct else self(*args, **kwargs)
        note("output", out)
        self.loss(out).backward()

    direct = False

    def before(self, step: int) -> None:
        self.direct = step % 2 == 1


@case(quick=True)
class CallFromAnotherThread(Dropping):
    def train_step(self, note: Note, args: Any, kwargs: Any) -> None:
        if not self.threaded:
            return super().train_step(note, args, kwargs)
        raised: list[BaseException] = []

        def run() -> None:
            try:
                Living.train_step(self, note, args, kwargs)
            except BaseException as error:
                raised.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        if raised:
            raise raised[0]
        return None

    threaded = False

    def before(self, step: int) -> None:
        self.threaded = step in (1, 3)


@case("e4")
class ChangedInAnotherThread(CallFromAnotherThread):
    """A change that only the other thread's calls come to see."""

    def __init__(self) -> None:
        super().__init__()
        self._scale = 2.0

    def middle(self, h: Tensor) -> Tensor:
        return super().middle(h) * self._scale

    def change(self) -> None:
        self._scale = 3.0

    def before(self, step: int) -> None:
        super().before(step)
        if step == 2:
            self.change()


@case()
class AutocastToggled(Dropping):
    amp = False

    def train_step(self, note: Note, args: Any, kwargs: Any) -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.amp):
            out = self(*args, **kwargs)
            note("output", out)
            loss = self.loss(out.float())
        loss.backward()

    def before(self, step: int) -> None:
        self.amp = step == 2


@case(steady=False)
class AutocastOfAnotherDtype(AutocastToggled):
    def before(self, step: int) -> None:
        self.kind = torch.bfloat16 if step < 2 else torch.float16

    def train_step(self, note: Note, args: Any, kwargs: Any) -> None:
        with torch.autocast("cpu", dtype=self.kind):
            out = self(*args, **kwargs)
            note("output", out)
            loss = self.loss(out.float())
        loss.backward()

    kind = torch.bfloat16


@case(steady=False, shows=False)
class EvalForOneStep(Dropping):
    def before(self, step: int) -> None:
        self.train(step != 1)


@case()
class SubmoduleInEval(Dropping):
    def change(self) -> None:
        self.drop.eval()


@case(shows=False, steady=False)
class WithoutGradientsBetween(Dropping):
    """Validation between the steps."""

    def train_step(self, note: Note, args: Any, kwargs: Any) -> None:
        super().train_step(note, args, kwargs)
        self.eval()
        with torch.no_grad():
            note("validation", self(*args, **kwargs))
        self.train()
        with torch.inference_mode():
            note("inference", self(*args, **kwargs).clone())


@case("e4")
class DefaultDtypeChanged(Living):
    def middle(self, h: Tensor) -> Tensor:
        return (h + torch.linspace(0, 1, 12)).float()

    def change(self) -> None:
        torch.set_default_dtype(torch.float64)

    def leave(self) -> None:
        torch.set_default_dtype(torch.float32)


@case("e4", breaks=True)
class DefaultDeviceChanged(Living):
    """Tensors made on the meta device have no numbers: eager raises."""

    def middle(self, h: Tensor) -> Tensor:
        return h + torch.linspace(0, 1, 12)

    def change(self) -> None:
        torch.set_default_device("meta")

    def leave(self) -> None:
        torch.set_default_device(None)

    def inputs(self, step: int) -> Any:
        with torch.device("cpu"):
            return (data(step),), {}


@case()
class DeterministicToggled(Dropping):
    def before(self, step: int) -> None:
        if step >= 2:
            torch.use_deterministic_algorithms(step == 2, warn_only=step == 2)

    def leave(self) -> None:
        torch.use_deterministic_algorithms(False)


@case("e4")
class AsksForDeterminism(Living):
    def middle(self, h: Tensor) -> Tensor:
        return h * 2 if torch.are_deterministic_algorithms_enabled() else h * 3

    def change(self) -> None:
        torch.use_deterministic_algorithms(True)

    def leave(self) -> None:
        torch.use_deterministic_algorithms(False)


@case("e4", breaks=True)
class AsksForThreads(Living):
    def middle(self, h: Tensor) -> Tensor:
        return h * torch.get_num_threads()

    def change(self) -> None:
        torch.set_num_threads(2)

    def leave(self) -> None:
        torch.set_num_threads(1)


class AsksWhetherItIsCompiled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if torch.compiler.is_compiling() else x * 3


@case()
class UserCompilesMeanwhile(Dropping):
    """The user's own torch.compile is told that it compiles, the managed model that it does not."""

    def __init__(self) -> None:
        super().__init__()
        self.others = [torch.compile(AsksWhetherItIsCompiled(), backend="eager")]
        self.got: list[Tensor] = []

    def middle(self, h: Tensor) -> Tensor:
        h = super().middle(h)
        return h * 5 if torch.compiler.is_compiling() else h

    def before(self, step: int) -> None:
        self.got.append(self.others[0](torch.ones(2 + step % 2)))

    def observed(self) -> Any:
        return self.got


@case(shows=False)
class UserCompilesTheModel(Dropping):
    """The managed model inside of a function that is compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.compiled: Any = None

    def middle(self, h: Tensor) -> Tensor:
        return torch.sin(h)

    def train_step(self, note: Note, args: Any, kwargs: Any) -> None:
        call = torch.compile(lambda x: self(x) * 1.0, backend="eager") if self.asked else self
        out = call(*args, **kwargs)
        note("output", out)
        self.loss(out).backward()

    asked = False

    def change(self) -> None:
        self.asked = True


@case()
class AsksWhetherItIsTraced(Living):
    def middle(self, h: Tensor) -> Tensor:
        if torch.compiler.is_compiling() or torch.jit.is_tracing() or torch.jit.is_scripting():
            return h * 2
        return h * 3 if not torch.compiler.is_dynamo_compiling() else h


@case(breaks=True)
class DisabledForDynamo(Living):
    @torch._dynamo.disable  # type: ignore[misc]
    def middle(self, h: Tensor) -> Tensor:
        return h * 2
