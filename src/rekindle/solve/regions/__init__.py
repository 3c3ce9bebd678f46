"""One schedule over the regions of a model, between which opaque code runs: see
docs/internals/regions.md."""

from rekindle.solve.regions.choice import Moment, choose_options
from rekindle.solve.regions.menu import RegionOption, eager_option, keeps_inputs_only, menu_of
from rekindle.solve.regions.search import StepSchedule, search_options, simulated
from rekindle.solve.regions.step_problem import RegionCall, StepEvent, StepProblem, Storage

__all__ = [
    "Moment",
    "RegionCall",
    "RegionOption",
    "StepEvent",
    "StepProblem",
    "StepSchedule",
    "Storage",
    "choose_options",
    "eager_option",
    "keeps_inputs_only",
    "menu_of",
    "search_options",
    "simulated",
]
