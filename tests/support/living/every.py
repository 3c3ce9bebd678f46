"""All cases, by name."""

from support.living import (
    activations,
    ambient,
    arguments,
    attributes,
    autograd,
    branches,
    copies,
    effects,
    hooks,
    inputs,
    norms,
    outside,
    parameters,
    randomness,
    surroundings,
)
from support.living.cases import CASES

ROOMS = (
    activations,
    ambient,
    arguments,
    attributes,
    autograd,
    branches,
    copies,
    effects,
    hooks,
    inputs,
    norms,
    outside,
    parameters,
    randomness,
    surroundings,
)

__all__ = ["CASES", "ROOMS"]
