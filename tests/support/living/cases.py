"""Living Python: small models whose state or surroundings change between training steps.

A case is a subclass of `Living`. The same code runs once in eager mode and once managed, so that a
managed model can be compared with eager through the change. `campaign` does the comparison.
"""

import copy
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from support.zoo import generator
from torch import Tensor, nn

STEPS = 4
CHANGED = 2  # the first step after the change
BATCH, WIDTH, HIDDEN, OUT = 64, 6, 12, 3

Note = Callable[[str, Any], None]


def data(step: int, *shape: int, requires_grad: bool = False) -> Tensor:
    """Random numbers of a step, from a stream of their own."""
    return torch.randn(shape or (BATCH, WIDTH), generator=generator(step)).requires_grad_(
        requires_grad
    )


class Living(nn.Module):
    """A small model and what happens to it. The batch is larger than the layers, so that
    recomputing activations saves memory."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, HIDDEN)
        self.second = nn.Linear(HIDDEN, OUT)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.sigmoid(self.middle(torch.tanh(self.first(x)))))

    def middle(self, h: Tensor) -> Tensor:
        """What most cases are about."""
        return h

    def inputs(self, step: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (data(step),), {}

    def before(self, step: int) -> nn.Module | None:
        """Runs before each step; a module that is returned takes this one's place."""
        if step == CHANGED:
            self.change()
        return None

    def change(self) -> None:
        """Between the second step and the third."""

    def loss(self, out: Any) -> Tensor:
        return out.square().mean()

    def train_step(self, note: Note, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Forward, loss and backward, with a note of what the caller sees."""
        out = self(*args, **kwargs)
        note("output", out)
        loss = self.loss(out)
        note("loss", loss)
        loss.backward()

    def observed(self) -> Any:
        """What forward leaves on objects, and the random streams that it owns."""
        return ()

    def leave(self) -> None:
        """Puts back what was changed outside the model."""


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    make: Callable[[], Living]
    breaks: bool  # Dynamo breaks the graph or knows no answer: refusing by name is allowed
    steady: bool  # the first two steps read the same: one plan covers both
    shows: bool  # the output's `grad_fn` tells a planned call from eager
    quick: bool
    refusal: str  # of what a plan cannot do, in a step, by words that its error must have


CASES: dict[str, Case] = {}


def case(
    finding: str = "",
    *,
    breaks: bool = False,
    steady: bool = True,
    shows: bool = True,
    quick: bool = False,
    refusal: str = "",
) -> Callable[[type[Living]], type[Living]]:
    """Registers a model under its class's name, after the number of its finding."""

    def register(cls: type[Living]) -> type[Living]:
        words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", cls.__name__)
        name = f"{finding}_{words}".strip("_").lower()
        assert name not in CASES, name
        CASES[name] = Case(name, cls, breaks, steady, shows, quick, refusal)
        return cls

    return register


def restored(table: Any, before: Any) -> None:
    """Gives a module-level list, dictionary or namespace its contents back, in place."""
    if isinstance(table, list):
        table[:] = copy.copy(before)
    else:
        table.clear()
        table.update(before)
