"""Shared by the integrations: options given by name, and a model that is managed in place without a
sample, so that its first call with gradients is planned.
"""

import dataclasses
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from rekindle.errors import RekindleError
from rekindle.integrate.distributed import FirstTogether
from rekindle.plan_object import manage_plan
from rekindle.plans.options import Options
from rekindle.runtime.managed_module import is_managed, plan_of

log = logging.getLogger("rekindle")


class BadOption(RekindleError, ValueError):
    """An option that an integration does not know, or a missing budget."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Options of an integration, and how it makes plans."""

    options: Options
    share: bool = False  # all ranks of a data-parallel run make the first plan together

    def manage(self, model: nn.Module) -> nn.Module:
        """Manages the model in place; its first call with gradients will be planned."""
        # By the user, or by an earlier run of the same trainer: managing it again would drop plans.
        if is_managed(model):
            return model
        planner = FirstTogether(self.options) if self.share else None
        return manage_plan(self.options, None, model, inplace=True, planner=planner)


def settings_of(
    given: Mapping[str, Any], who: str, *, share: bool = False, **defaults: Any
) -> Settings:
    """Options of `rekindle.rematerialize`, except that calls of other shapes are planned too: the
    last batch of an epoch is often smaller. Unknown names are refused, not ignored."""
    return Settings(options_of({"on_miss": "replan", **defaults, **given}, who), share)


def options_of(named: Mapping[str, Any], who: str) -> Options:
    """The options that a trainer's user gave by name; `BadOption` names an unknown one."""
    # With `loss_fn` the call returns the loss, which the trainer's own loop does not expect.
    known = [f.name for f in dataclasses.fields(Options) if f.name != "loss_fn"]
    unknown = [name for name in named if name not in known]
    if unknown:
        raise BadOption(f"{who} has no option {unknown[0]!r}; it knows {', '.join(known)}")
    if not any(named.get(name) is not None for name in ("budget", "device_budget", "schedule")):
        raise BadOption(f"{who} needs a budget, such as budget='8GiB' or budget=0.5")
    return Options(**named)


def warn_if_unplanned(model: nn.Module, who: str) -> bool:
    """Warns if a managed model has trained a step without being called, so that no plan was made.
    Returns whether it warned."""
    # A trainer may call a submodule or a method other than `forward`; without this warning, a
    # budget that has no effect would go unnoticed.
    if not is_managed(model) or plan_of(model) is not None:
        return False
    log.warning(
        "%s: a step has been trained and %s was not called with gradients, so nothing is planned "
        "and the budget has no effect; name the module that training calls",
        who,
        type(model).__name__,
    )
    return True
