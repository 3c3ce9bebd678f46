"""What a planned step will need on the device: its peak by the allocator's rules, its time by the
stream's; and the same measured."""

from rekindle.predict.device_budget import (
    DeviceBudget,
    Residents,
    device_budget,
    residents_of,
)
from rekindle.predict.predictor import Predictor
from rekindle.predict.step_measurement import Prediction, StepMeasurement, measure_step

__all__ = [
    "DeviceBudget",
    "Prediction",
    "Predictor",
    "Residents",
    "StepMeasurement",
    "device_budget",
    "measure_step",
    "residents_of",
]
