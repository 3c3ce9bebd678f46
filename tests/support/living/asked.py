"""What a forward can ask of objects, tensors and torch, and the answer changes (finding E4)."""

import contextvars
import enum
import operator
import threading
from typing import Any

import torch
from support.living.cases import Living, case, data, restored
from torch import Tensor, nn


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 3


@case("e4")
class IntegerEnum(Living):
    def __init__(self) -> None:
        super().__init__()
        self.level = Level.LOW

    def middle(self, h: Tensor) -> Tensor:
        return h * self.level

    def change(self) -> None:
        self.level = Level.HIGH


class Settings(dict):
    """A dictionary of attributes, as many configurations are."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


@case("e4")
class DictOfAttributes(Living):
    def __init__(self) -> None:
        super().__init__()
        self.settings = Settings(scale=2.0)

    def middle(self, h: Tensor) -> Tensor:
        return h * self.settings.scale

    def change(self) -> None:
        self.settings["scale"] = 3.0


class Indexed:
    def __init__(self) -> None:
        self.levels = [2.0, 3.0]
        self.at = 0

    def __getitem__(self, i: int) -> float:
        return self.levels[self.at + i]

    def __len__(self) -> int:
        return 1 + self.at

    def __bool__(self) -> bool:
        return self.at == 0


@case("e4")
class ObjectWithOperators(Living):
    def __init__(self) -> None:
        super().__init__()
        self.levels = Indexed()

    def middle(self, h: Tensor) -> Tensor:
        return h * self.levels[0] * len(self.levels) if self.levels else h * self.levels[0]

    def change(self) -> None:
        self.levels.at = 1


@case("e4", breaks=True)
class GetterOfOperator(Living):
    def __init__(self) -> None:
        super().__init__()
        self.get = operator.attrgetter("level")
        self.level = 2.0

    def middle(self, h: Tensor) -> Tensor:
        return h * self.get(self)

    def change(self) -> None:
        self.level = 3.0


@case("e4")
class AttributeByName(Living):
    def __init__(self) -> None:
        super().__init__()
        self.name, self.low, self.high = "low", 2.0, 3.0

    def middle(self, h: Tensor) -> Tensor:
        return h * getattr(self, self.name) * len(vars(self)["name"])

    def change(self) -> None:
        self.name = "high"


CONTEXT: contextvars.ContextVar[float] = contextvars.ContextVar("scale", default=2.0)


@case("e4", breaks=True)
class ContextVariable(Living):
    def middle(self, h: Tensor) -> Tensor:
        return h * CONTEXT.get()

    def change(self) -> None:
        CONTEXT.set(3.0)

    def leave(self) -> None:
        CONTEXT.set(2.0)


LOCAL = threading.local()


@case("e4")
class ThreadLocal(Living):
    def middle(self, h: Tensor) -> Tensor:
        return h * getattr(LOCAL, "scale", 2.0)

    def change(self) -> None:
        LOCAL.scale = 3.0

    def leave(self) -> None:
        if hasattr(LOCAL, "scale"):
            del LOCAL.scale


@case("e4")
class AttributeOfAParameter(Living):
    """As tensor-parallel and optimizer libraries mark parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first.weight.scale = 2.0

    def middle(self, h: Tensor) -> Tensor:
        return h * self.first.weight.scale

    def change(self) -> None:
        self.first.weight.scale = 3.0


@case("e4")
class AttributeOfAnInput(Living):
    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)) * x.scale)

    def inputs(self, step: int) -> Any:
        x = data(step)
        x.scale = 2.0 if step < 2 else 3.0
        return (x,), {}


@case("e4")
class AsksForAGradient(Living):
    """A forward that looks whether gradients have been gathered."""

    def middle(self, h: Tensor) -> Tensor:
        return h * 2 if self.second.bias.grad is None else h * 3

    def change(self) -> None:
        self.second.bias.grad = torch.ones(3)


@case("e4")
class AsksForRequiresGrad(Living):
    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        return self.second(h * 2 if x.requires_grad else h * 3)

    def inputs(self, step: int) -> Any:
        return (data(step, requires_grad=step >= 2),), {}


@case("e4")
class AsksForTheLayout(Living):
    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        return self.second(h * 2 if x.is_contiguous() else h * 3)

    def inputs(self, step: int) -> Any:
        return (data(step) if step < 2 else data(step, 6, 64).t(),), {}


@case("e4")
class AsksForALeaf(Living):
    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        return self.second(h * 2 if x.is_leaf else h * 3)

    def inputs(self, step: int) -> Any:
        x = data(step, requires_grad=True)
        return (x if step < 2 else x * 1,), {}


@case("e4", breaks=True)
class AsksForAVersion(Living):
    def middle(self, h: Tensor) -> Tensor:
        return h * 2 if self.first.bias._version < 100 else h * 3

    def change(self) -> None:
        with torch.no_grad():
            for _ in range(100):
                self.first.bias.add_(0)


@case("e4")
class AsksForAliasing(Living):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = torch.tanh(self.first(x) + self.first(y))
        return self.second(h * 2 if x is y else h * 3)

    def inputs(self, step: int) -> Any:
        x = data(step)
        return (x, x if step >= 2 else data(step + 50)), {}


@case("e4", breaks=True)
class AsksForStorage(AsksForAliasing):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = torch.tanh(self.first(x) + self.first(y))
        return self.second(h * 2 if x.data_ptr() == y.data_ptr() else h * 3)

    def inputs(self, step: int) -> Any:
        x = data(step)
        return (x, x.view(64, 6) if step >= 2 else data(step + 50)), {}


@case("e4")
class AsksForAutocast(Living):
    amp = False

    def middle(self, h: Tensor) -> Tensor:
        return h * 2 if torch.is_autocast_enabled("cpu") else h * 3

    def before(self, step: int) -> None:
        self.amp = step >= 2

    def train_step(self, note: Any, args: Any, kwargs: Any) -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.amp):
            super().train_step(note, args, kwargs)


@case("e4", breaks=True)
class AsksForPrecision(Living):
    def middle(self, h: Tensor) -> Tensor:
        return h * 2 if torch.get_float32_matmul_precision() == "highest" else h * 3

    def change(self) -> None:
        torch.set_float32_matmul_precision("high")

    def leave(self) -> None:
        torch.set_float32_matmul_precision("highest")


@case("e4")
class AsksForABackend(Living):
    def middle(self, h: Tensor) -> Tensor:
        return h * 2 if torch.backends.cuda.matmul.allow_tf32 else h * 3

    def change(self) -> None:
        torch.backends.cuda.matmul.allow_tf32 = True

    def leave(self) -> None:
        torch.backends.cuda.matmul.allow_tf32 = False


@case("e4", breaks=True)
class AsksForTheSeed(Living):
    def middle(self, h: Tensor) -> Tensor:
        return h * 2 if torch.initial_seed() == 7 else h * 3

    def change(self) -> None:
        torch.manual_seed(8)


@case("e4")
class AsksWhetherItTrains(Living):
    def middle(self, h: Tensor) -> Tensor:
        return h * 2 if self.second.training else h * 3

    def change(self) -> None:
        self.second.training = False


@case("e4")
class AsksForTheMode(Living):
    """Grad mode by name, with a call in no-grad mode between two steps."""

    def middle(self, h: Tensor) -> Tensor:
        return h * 2 if torch.is_grad_enabled() else h * 3

    def change(self) -> None:
        with torch.no_grad():
            self.got = self(data(40))

    def observed(self) -> Any:
        return getattr(self, "got", None)


@case("e4")
class AsksWhoIsThere(Living):
    """The names of submodules and parameters, as a regularizer walks them."""

    def middle(self, h: Tensor) -> Tensor:
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                h = h + parameter.square().sum()
        return h * len(list(self.children()))

    def change(self) -> None:
        self.third = nn.Linear(2, 2)


@case("e4", breaks=True)
class GlobalAppears(Living):
    def middle(self, h: Tensor) -> Tensor:
        return h * 3 if "FOUND" in globals() else h * 2

    def change(self) -> None:
        globals()["FOUND"] = 1

    def leave(self) -> None:
        globals().pop("FOUND", None)


ORDER = {"a": 2.0, "b": 3.0}


@case("e4")
class OrderOfADict(Living):
    def middle(self, h: Tensor) -> Tensor:
        for name in ORDER:
            h = h * 2 if name == "a" else h + 1
        return h

    def change(self) -> None:
        ORDER["a"] = ORDER.pop("a")

    def leave(self) -> None:
        restored(ORDER, {"a": 2.0, "b": 3.0})
