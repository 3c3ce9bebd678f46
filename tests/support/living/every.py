"""All cases, by name."""

from support.living import (
    activations,
    ambient,
    arguments,
    asked,
    attributes,
    autograd,
    branches,
    copies,
    effects,
    hooks,
    inputs,
    mixed_adapters,
    mixed_company,
    mixed_models,
    mixed_steps,
    norms,
    outside,
    parameters,
    patched,
    randomness,
    surroundings,
)
from support.living.cases import CASES

ROOMS = (
    activations,
    ambient,
    arguments,
    asked,
    attributes,
    autograd,
    branches,
    copies,
    effects,
    hooks,
    inputs,
    mixed_adapters,
    mixed_company,
    mixed_models,
    mixed_steps,
    norms,
    outside,
    parameters,
    patched,
    randomness,
    surroundings,
)

__all__ = ["CASES", "ROOMS"]
