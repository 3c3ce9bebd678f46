"""Whether what a pass puts in gives eager's numbers here: both are run, once, and compared.

A kernel that is exact on one GPU need not be so on another: torch picks its own kernels, and orders
its sums, by the device, the dtype and sometimes the shape. So no pass that brings a kernel trusts
the argument for it alone. The trial itself stands in the pass, beside what it tries; here is what
all trials have in common.
"""

import functools
from collections.abc import Callable, Iterable
from typing import ParamSpec, cast

import torch

P = ParamSpec("P")


def tried_once(trial: Callable[P, bool]) -> Callable[P, bool]:
    """The answer of a trial, kept for the process: its arguments are all that it depends on (such
    as the dtype and the device). False where it cannot be run: there is no compiler, or no memory
    to try, and the ops stay as they are."""

    def answer(*key: P.args, **named: P.kwargs) -> bool:
        try:
            return trial(*key, **named)
        except RuntimeError:
            return False

    return cast(Callable[P, bool], functools.cache(answer))


def same_numbers(ours: Iterable[torch.Tensor], theirs: Iterable[torch.Tensor]) -> bool:
    """Whether tensors are equal pair by pair, in shape and dtype too; NaN is equal to NaN."""
    return all(
        a.shape == b.shape
        and a.dtype == b.dtype
        and bool(((a == b) | (a.isnan() & b.isnan())).all())
        for a, b in zip(ours, theirs, strict=True)
    )


def same_bits(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """The same, but 0 and -0 differ."""
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return False
    bits = torch.int32 if ours.dtype == torch.float32 else torch.int16
    return bool(((ours.view(bits) == theirs.view(bits)) | (ours.isnan() & theirs.isnan())).all())
