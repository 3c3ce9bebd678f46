"""One schedule over the regions of a model, between which opaque code runs: see
docs/internals/regions.md."""

from rekindle.solve.regions.choice import Moment, choose_options
from rekindle.solve.regions.fullest_path import Step, fullest, group_of, with_call
from rekindle.solve.regions.menu import RegionOption, eager_option, keeps_inputs_only, menu_of
from rekindle.solve.regions.search import Chosen, search_options, simulated
from rekindle.solve.regions.step_problem import Key, RegionCall, StepEvent, StepProblem, Storage

__all__ = [
    "Chosen",
    "Key",
    "Moment",
    "RegionCall",
    "RegionOption",
    "Step",
    "StepEvent",
    "StepProblem",
    "Storage",
    "choose_options",
    "eager_option",
    "fullest",
    "group_of",
    "keeps_inputs_only",
    "menu_of",
    "search_options",
    "simulated",
    "with_call",
]
