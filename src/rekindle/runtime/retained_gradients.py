"""Gradients of outputs that retain them (`retain_grad()`), where the model went on computing from
such an output: a part of the gradient arises inside of the plan, which hands out the whole."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from rekindle.runtime.runner import Runner, Step


def without_retained(
    runner: "Runner", step: "Step", index: int, made: Sequence[Any]
) -> Sequence[Any]:
    """The gradients of the leaves that a stretch of the backward has made. Those of outputs go
    where `retain_grad()` puts them: autograd has put there what came from outside, a part of it."""
    if not runner.joint.retained and (step.other is None or not step.other.joint.retained):
        return made
    slots = runner.slot_of_output
    pairs = list(zip(runner.leaves[index], made, strict=True))
    whole = [(leaf, gradient) for leaf, gradient in pairs if leaf in slots]
    if step.other is not None:  # of a backward that the plan did not expect
        shown = [leaf for leaf in step.gradients if leaf in slots]
        whole += [(leaf, step.gradients.pop(leaf)) for leaf in shown]
    for leaf, gradient in whole:
        if gradient is not None:
            _retain(step, slots[leaf], gradient)
    return [gradient for leaf, gradient in pairs if leaf not in slots]


def _retain(step: "Step", slot: int, gradient: torch.Tensor) -> None:
    out = step.given[slot]()
    if out is None or not out.retains_grad:
        return
    gradient = gradient.clone(memory_format=torch.contiguous_format)  # as autograd does
    before = step.retained.get(slot)  # of an earlier backward through the same graph
    step.retained[slot] = gradient if before is None else before + gradient
    out.grad = step.retained[slot]
