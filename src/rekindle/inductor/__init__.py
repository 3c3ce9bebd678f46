"""Inductor's kernels under our schedules: a recorded `JointGraph` -> one of compiled kernels."""

from rekindle.inductor.attempt import with_compiled_kernels
from rekindle.inductor.compilation import compiled
from rekindle.inductor.wrapper import NotCompiled

__all__ = ["NotCompiled", "compiled", "with_compiled_kernels"]
