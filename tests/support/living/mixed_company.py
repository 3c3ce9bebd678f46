"""Several models, managed or not, that share or copy what they are made of (second wave)."""

import copy
from typing import Any

import torch
from support.living.cases import WIDTH, Living, Note, case, data
from support.living.mixed_models import Block, Shares
from torch import Tensor, nn

import rekindle


class Adversary(Living):
    """A discriminator that sees two batches, one of them detached."""

    def __init__(self) -> None:
        super().__init__()
        self.noise = Block()
        self.maker = nn.Linear(WIDTH, WIDTH)

    def middle(self, h: Tensor) -> Tensor:
        return self.noise(h)

    def train_step(self, note: Note, args: Any, kwargs: Any) -> None:
        fake = torch.tanh(self.maker(args[0]))
        real, made = self(*args, **kwargs), self(fake.detach())
        note("output", (real, made))
        self.loss(real).backward()
        self.loss(made - 1).backward()
        self.requires_grad_(False)
        self.maker.requires_grad_(True)
        again = self(fake)
        note("again", again)
        self.loss(again - 2).backward()
        self.requires_grad_(True)


@case("mix", steady=False)
class TrainedInTurn(Adversary):
    def change(self) -> None:
        self.noise.scales[0] = 0.5


@case("mix", steady=False, shows=False)
class TeacherOfItself(Shares):
    """A teacher that is a deep copy of the managed model, in eval mode, its weights averaged."""

    def before(self, step: int) -> None:
        if step == 1:
            self.teacher = [copy.deepcopy(self).eval()]
        if step == 2:
            self.teacher[0].block.scales[0] = 3.0

    def train_step(self, note: Note, args: Any, kwargs: Any) -> None:
        out = self(*args, **kwargs)
        note("output", out)
        loss = self.loss(out)
        for teacher in getattr(self, "teacher", ()):
            with torch.no_grad():
                target = teacher(*args)
            loss = loss + (out - target).square().mean()
        loss.backward()


@case("mix")
class CopyHasItsOwnLists(Shares):
    """A change of the copy is no change of the model."""

    def change(self) -> None:
        self.copies = [copy.deepcopy(self)]
        self.copies[0].block.scales[0] = 9.0
        self.got = self.copies[0](data(70)).detach()

    def observed(self) -> Any:
        return getattr(self, "got", None)


@case("mix", shows=False)
class ShallowCopy(Shares):
    """`copy.copy` shares everything but the object itself."""

    def before(self, step: int) -> nn.Module | None:
        if step != 2:
            return None
        self.block.scales[0] = 0.25
        return copy.copy(self)


class Outer(Living):
    """A model of which only a part is managed: what surrounds it is eager."""

    def __init__(self) -> None:
        super().__init__()
        self.part: nn.Module = Part()
        self.scale = 1.0

    def middle(self, h: Tensor) -> Tensor:
        return self.part(h * self.scale)


class Part(Living):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(12, 12), nn.Linear(12, 12)
        self.block = Block()

    def middle(self, h: Tensor) -> Tensor:
        return self.block(h)


@case("mix", breaks=True, steady=False)
class ManagedInsideOfManaged(Outer):
    def before(self, step: int) -> None:
        if step == 1 and "plans" in dir(self):
            h = torch.randn(64, 12, generator=torch.Generator().manual_seed(1))
            h.requires_grad_()
            self.part = rekindle.rematerialize(self.part, (h,), budget=1.0, profile="estimate")
        if step == 2:
            self.part.block.scales[0] = 0.25


@case("mix")
class TwoModelsShareALayer(Shares):
    """The other model trains between the steps, with the shared block changed for it."""

    def before(self, step: int) -> None:
        if step < 2:
            return
        self.block.scales[0] = 0.25 * step
        other = nn.Sequential(nn.Linear(12, 12), self.block)
        other(torch.ones(4, 12)).sum().backward()
        self.zero_grad(set_to_none=True)
