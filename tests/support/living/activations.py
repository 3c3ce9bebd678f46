"""Activations that are stored on the model and used by the caller (findings E11, E17)."""

from typing import Any

import torch
from support.living.cases import Living, Note, case
from torch import Tensor


@case("e11")
class ActivationInTheLoss(Living):
    def middle(self, h: Tensor) -> Tensor:
        self.h = torch.sin(h)
        return self.h * 2

    def loss(self, out: Tensor) -> Tensor:
        return out.square().mean() + self.h.abs().mean()


@case("e11", breaks=True, quick=True)
class GradientOfAnActivation(Living):
    """Grad-CAM: the forward asks for the gradient of what it stores."""

    def middle(self, h: Tensor) -> Tensor:
        self.h = torch.sin(h)
        self.h.retain_grad()
        return self.h * 2

    def train_step(self, note: Note, args: Any, kwargs: Any) -> None:
        super().train_step(note, args, kwargs)
        note("gradient of the activation", self.h.grad)


@case("e11")
class RetainedByTheCaller(Living):
    def middle(self, h: Tensor) -> Tensor:
        self.h = torch.sin(h)
        return self.h * 2

    def train_step(self, note: Note, args: Any, kwargs: Any) -> None:
        out = self(*args, **kwargs)
        self.h.retain_grad()
        note("output", out)
        self.loss(out).backward()
        note("gradient of the activation", self.h.grad)


@case("e11", refusal="or its gradient was asked for")
class GradientWithRespectToIt(RetainedByTheCaller):
    def train_step(self, note: Note, args: Any, kwargs: Any) -> None:
        out = self(*args, **kwargs)
        note("output", out)
        wanted = [self.h, self.second.weight, self.first.weight]
        note("gradients", torch.autograd.grad(self.loss(out), wanted))
        self.h = None


@case("e17")
class RetainGradInForward(Living):
    def middle(self, h: Tensor) -> Tensor:
        h = torch.sin(h)
        if h.requires_grad:
            h.retain_grad()
        return h * 2
