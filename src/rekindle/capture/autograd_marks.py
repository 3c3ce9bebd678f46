"""What forward does to tensors that autograd shows outside, and a plan cannot repeat: refused by
name, where it would be lost in silence."""

from collections.abc import Iterable, Sequence

import torch

from rekindle.capture.node_facts import facts
from rekindle.capture.recorder import Recorder
from rekindle.errors import CaptureError


def refuse_marks(
    recorder: Recorder, given: Iterable[torch.Tensor], leaves: Sequence[torch.Tensor]
) -> None:
    """`given`: the stand-ins of parameters, buffers and arguments; `leaves`: those among them that
    required grad when forward began, or were told to."""
    known = {id(leaf) for leaf in leaves}
    for fake in given:
        if torch.is_grad_enabled() and fake.requires_grad and id(fake) not in known:
            source = facts(recorder.node_of(fake)).source
            name = "a tensor" if source is None else f"{source.kind} {source.name}"
            raise CaptureError(
                f"forward makes {name} require grad by a write into it of what does, which a plan "
                "cannot repeat; write into a clone"
            )


def shown_arguments(recorder: Recorder, outputs: Sequence[torch.Tensor]) -> set[int]:
    """Which outputs show what was given: eager itself makes those at each call, and their
    gradients take no part in the plan."""
    given = {facts(n).storage for n in recorder.graph.nodes if n.op == "placeholder"}
    return {i for i, t in enumerate(outputs) if recorder.storage_of(t) in given}
