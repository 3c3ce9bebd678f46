"""Random generators that a model holds itself (`torch.Generator`), beside the device's own.

An op that was given one draws from it alone. What runs such an op outside a step (a question to the
data, a measurement, a check against eager) puts its stream back afterwards.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn


def own_generator(node: fx.Node) -> torch.Generator | None:
    """The generator that a recorded call was given; None where it draws from the device's own."""
    for argument in (*node.args, *node.kwargs.values()):
        if isinstance(argument, torch.Generator):
            return argument
    return None


def generators_of(nodes: Iterable[fx.Node]) -> list[torch.Generator]:
    """The distinct generators that recorded calls were given, in order."""
    found = [own_generator(node) for node in nodes]
    return list({id(g): g for g in found if g is not None}.values())


def reachable_generators(model: nn.Module, *given: Any) -> list[torch.Generator]:
    """The generators among the attributes of the model's modules and the arguments of a call."""
    found: dict[int, torch.Generator] = {}
    for module in model.modules():
        _collect(vars(module), found, depth=4)
    _collect(given, found, depth=8)
    return list(found.values())


def _collect(value: Any, found: dict[int, torch.Generator], depth: int) -> None:
    if isinstance(value, torch.Generator):
        found[id(value)] = value
    elif depth > 0 and isinstance(value, dict):
        for item in value.values():
            _collect(item, found, depth - 1)
    elif depth > 0 and isinstance(value, (list, tuple, set)):
        for item in value:
            _collect(item, found, depth - 1)


@contextmanager
def left_alone(generators: Iterable[torch.Generator]) -> Iterator[None]:
    """Their streams as they were, whatever runs inside."""
    before = [(generator, generator.get_state()) for generator in generators]
    try:
        yield
    finally:
        for generator, state in before:
            generator.set_state(state)
