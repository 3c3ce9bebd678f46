"""What all adapters share: options given by name, and a model managed in place without a sample."""

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
    """An option that an adapter does not know, or no budget."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Options, and how an adapter makes the plans."""

    options: Options
    share: bool = False  # ranks that train in step make the first plan together

    def manage(self, model: nn.Module) -> nn.Module:
        """The model itself, whose first call with gradients will be planned."""
        if is_managed(model):  # by the user, or by an earlier run of the same trainer
            return model
        planner = FirstTogether(self.options) if self.share else None
        return manage_plan(self.options, None, model, inplace=True, planner=planner)


def settings_of(
    given: Mapping[str, Any], who: str, *, share: bool = False, **defaults: Any
) -> Settings:
    """Options as `rekindle.rematerialize` takes them, but that further kinds of call are planned,
    since trainers bring them; unknown names are refused, not ignored."""
    return Settings(options_of({"on_miss": "replan", **defaults, **given}, who), share)


def options_of(named: Mapping[str, Any], who: str) -> Options:
    # A loss taken into the call would change what the call returns: not inside somebody's loop.
    known = [f.name for f in dataclasses.fields(Options) if f.name != "loss_fn"]
    unknown = [name for name in named if name not in known]
    if unknown:
        raise BadOption(f"{who} has no option {unknown[0]!r}; it knows {', '.join(known)}")
    if not any(named.get(name) is not None for name in ("budget", "device_budget", "schedule")):
        raise BadOption(f"{who} needs a budget, such as budget='8GiB' or budget=0.5")
    return Options(**named)


def tell_if_idle(model: nn.Module, who: str) -> bool:
    """Says aloud that a managed model has trained without a plan: a setting without effect is the
    worst of all. True where it has."""
    if not is_managed(model) or plan_of(model) is not None:
        return False
    log.warning(
        "%s: a step has been trained and %s was not called with gradients, so nothing is planned "
        "and no budget is kept; name the module that training calls",
        who,
        type(model).__name__,
    )
    return True
