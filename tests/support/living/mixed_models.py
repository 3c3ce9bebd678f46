"""Kinds of change mixed in one model (second wave): what is shared, tied, checkpointed, hooked."""

import copy
import dataclasses
import types
from typing import Any

import torch
from support.living.cases import OUT, Living, case, data
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    """Reads a list, draws a mask, counts in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 12)
        self.drop = nn.Dropout(0.2)
        self.scales = [1.0, 0.5]
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, h: Tensor) -> Tensor:
        for scale in self.scales:
            h = h + scale * torch.tanh(self.linear(h))
        return self.drop(h)


class Shares(Living):
    """One block used twice, a third one tied to it."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.again = self.block
        self.tied = Block()
        self.tied.linear.weight = self.block.linear.weight

    def middle(self, h: Tensor) -> Tensor:
        return self.tied(self.again(torch.sin(self.block(h))))


@case("mix", quick=True)
class SharedBlockListChanges(Shares):
    def change(self) -> None:
        self.again.scales[0] = -1.0


class SharesInCheckpoints(Shares):
    reentrant = False

    def middle(self, h: Tensor) -> Tensor:
        h = checkpoint(self.block, h, use_reentrant=self.reentrant)
        return self.tied(checkpoint(self.again, torch.sin(h), use_reentrant=self.reentrant))


@case("mix")
class SharedBlockInCheckpoints(SharesInCheckpoints):
    def change(self) -> None:
        self.block.scales[:] = [0.25]


@case("mix")
class SharedBlockInReentrantCheckpoints(SharedBlockInCheckpoints):
    """No weight is used more than twice: a nested backward adds three gradients up in another
    order (E12)."""

    reentrant = True

    def __init__(self) -> None:
        super().__init__()
        self.tied = Block()
        self.block.scales = [1.0]


@case("mix")
class SharedBlockUntiedAndHooked(Shares):
    def change(self) -> None:
        self.tied.linear.weight = nn.Parameter(self.tied.linear.weight.detach() * 0.5)
        self.again.register_forward_hook(lambda module, args, out: out * module.scales[1])


@case("mix")
class SharedBlockComesApart(Shares):
    def change(self) -> None:
        self.again = copy.deepcopy(self.block)
        self.again.scales = [2.0]


@case("mix")
class SharedBlockBecomesOne(Shares):
    def change(self) -> None:
        self.tied = self.block


@case("mix")
class SharedBlockPartlyInEval(Shares):
    def change(self) -> None:
        self.tied.eval()
        self.block.drop.p = 0.5


@case("mix")
class SharedBlockParametrized(Shares):
    """The weight that is tied is made of another one, in one of its two places."""

    def change(self) -> None:
        parametrizations.weight_norm(self.block.linear)


@case("mix")
class SharedBlockParametrizationRemoved(Shares):
    def __init__(self) -> None:
        super().__init__()
        parametrizations.weight_norm(self.block.linear)

    def change(self) -> None:
        parametrize.remove_parametrizations(self.block.linear, "weight")


@case("mix")
class SharedBlockPruned(Shares):
    def change(self) -> None:
        prune.random_unstructured(self.tied.linear, "bias", 0.5)
        prune.l1_unstructured(self.block.linear, "weight", 0.5)


@case("mix")
class StateAssignedUnties(Shares):
    """`assign=True` gives both names a tensor each."""

    def change(self) -> None:
        state = {k: v.detach().clone() * 0.5 for k, v in self.state_dict().items()}
        self.load_state_dict(state, assign=True)


@case("mix")
class SharedConfig(Living):
    """One object that two submodules read, changed through one of them."""

    def __init__(self) -> None:
        super().__init__()
        config = types.SimpleNamespace(scales=[1.0, 2.0], act="tanh")
        self.blocks = nn.ModuleList(Reader(config) for _ in range(2))

    def middle(self, h: Tensor) -> Tensor:
        for block in self.blocks:
            h = block(h)
        return h

    def change(self) -> None:
        self.blocks[0].config.scales[1] = 0.5
        self.blocks[1].config.act = "relu"


class Reader(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.linear = nn.Linear(12, 12)

    def forward(self, h: Tensor) -> Tensor:
        h = getattr(torch, self.config.act)(self.linear(h))
        return h * sum(self.config.scales)


@case("mix")
class SharedConfigComesApart(SharedConfig):
    def change(self) -> None:
        self.blocks[1].config = copy.deepcopy(self.blocks[1].config)
        self.blocks[1].config.scales.append(3.0)


@case("mix")
class ProgressiveGrowing(Living):
    """A layer is appended and faded in."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(12, 12)])
        self.alpha = 1.0

    def middle(self, h: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            h = torch.tanh(layer(h))
        return h + self.alpha * torch.tanh(self.layers[-1](h))

    def before(self, step: int) -> None:
        if step == 2:
            torch.manual_seed(4)
            self.layers.append(nn.Linear(12, 12))
        if step >= 2:
            self.alpha = 0.25 * step


@case("mix", steady=False)
class UnfrozenLayerByLayer(Living):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.trained: list[int] = []

    def middle(self, h: Tensor) -> Tensor:
        for layer in self.layers:
            h = layer(h)
        return h

    def before(self, step: int) -> None:
        self.layers.requires_grad_(False)
        self.trained.append(3 - step)
        for i in self.trained:
            self.layers[i].requires_grad_(True)


@case("mix")
class RoutedByAString(Living):
    def __init__(self) -> None:
        super().__init__()
        self.paths = nn.ModuleDict({"a": Block(), "b": nn.Sequential(nn.Linear(12, 12))})
        self.route = ["a", "b"]

    def middle(self, h: Tensor) -> Tensor:
        for name in self.route:
            h = self.paths[name](h)
        return h

    def change(self) -> None:
        self.route.reverse()
        self.paths["b"].append(nn.ReLU())


@case("mix")
class RemovedLayerStaysInAList(Living):
    """A layer that is no longer registered is still called, through a list of the user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(2))
        self.calls = list(self.layers)

    def middle(self, h: Tensor) -> Tensor:
        for layer in self.calls:
            h = torch.tanh(layer(h))
        return h

    def change(self) -> None:
        self.calls = [self.layers[1], self.layers[0]]


@case("mix")
class ExpertsWithLossesInCheckpoints(Living):
    """Balance losses gathered inside of checkpoints, as in a mixture of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.weight = 0.1

    def expert(self, h: Tensor, i: int) -> tuple[Tensor, Tensor]:
        h = self.blocks[i](h)
        return h, self.weight * h.square().mean()

    def middle(self, h: Tensor) -> Tensor:
        self.aux = []
        for i in range(2):
            h, loss = checkpoint(self.expert, h, i, use_reentrant=False)
            self.aux.append(loss)
        return h

    def loss(self, out: Tensor) -> Tensor:
        return out.square().mean() + sum(self.aux)

    def change(self) -> None:
        self.weight = 0.5
        self.blocks[1].scales.pop()


@dataclasses.dataclass
class Output:
    out: Tensor
    hidden: list[Tensor] | None = None
    names: tuple[str, ...] = ()


@case("mix", breaks=True)
class OutputObjectGrows(Living):
    """As of Hugging Face: a flag of the configuration adds fields to the output."""

    def __init__(self) -> None:
        super().__init__()
        self.config = types.SimpleNamespace(output_hidden=False)

    def forward(self, x: Tensor) -> Output:
        h = torch.tanh(self.first(x))
        g = torch.sin(h)
        out = Output(self.second(g))
        if self.config.output_hidden:
            out.hidden, out.names = [h, g], ("h", "g")
        return out

    def loss(self, out: Output) -> Tensor:
        return out.out.square().mean() + sum(h.mean() for h in out.hidden or ())

    def change(self) -> None:
        self.config.output_hidden = True


@case("mix")
class StructureOfOutputChanges(Living):
    def __init__(self) -> None:
        super().__init__()
        self.kind = "tuple"

    def forward(self, x: Tensor) -> Any:
        h = torch.tanh(self.first(x))
        return (self.second(h), h) if self.kind == "tuple" else {"out": self.second(h)}

    def loss(self, out: Any) -> Tensor:
        return (out[0] if isinstance(out, tuple) else out["out"]).square().mean()

    def change(self) -> None:
        self.kind = "dict"


@case("mix")
class ListOfTheCaller(Living):
    """The caller gives a list that the forward fills."""

    def forward(self, x: Tensor, hidden: list[Tensor] | None = None) -> Tensor:
        h = torch.tanh(self.first(x))
        if hidden is not None:
            hidden.append(torch.sin(h))
            h = hidden[-1]
        return self.second(h)

    def inputs(self, step: int) -> Any:
        self.hidden: Any = []
        return (data(step),), {"hidden": self.hidden if step != 2 else None}

    def loss(self, out: Tensor) -> Tensor:
        return out.square().mean() + sum(h.abs().mean() for h in self.hidden)

    def observed(self) -> Any:
        return [h.detach() for h in getattr(self, "hidden", ())]


@case("mix")
class PopsFromItsArgument(Living):
    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        labels = batch.pop("labels")
        batch["seen"] = self.second(torch.tanh(self.first(batch["x"])))
        return (batch["seen"] - labels).square().mean(0)

    def inputs(self, step: int) -> Any:
        self.batch = {"x": data(step), "labels": data(step + 50, 64, OUT)}
        return (self.batch,), {}

    def observed(self) -> Any:
        return {k: v.detach() for k, v in getattr(self, "batch", {}).items()}


@case("mix")
class TriesAnAttribute(Living):
    def middle(self, h: Tensor) -> Tensor:
        try:
            return h * self.maybe
        except AttributeError:
            return torch.sin(h)

    def change(self) -> None:
        self.maybe = 2.0
