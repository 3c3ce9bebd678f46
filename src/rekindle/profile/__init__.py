"""What each op costs: its time, its temporary memory and the true size of its outputs.

Measured on the device (`measure`), or estimated from a device description (`estimate`), kept on
disk between runs (`cache`).
"""

from rekindle.profile.base import OpProfile, Profile, Source
from rekindle.profile.blocks import blocks_of
from rekindle.profile.cache import device_name
from rekindle.profile.device import DeviceDescription, device_names, load_device
from rekindle.profile.predict import Predictor, charged_nodes, value_bytes
from rekindle.profile.residents import (
    HEADROOM,
    DeviceBudget,
    Residents,
    device_budget,
    residents_of,
)
from rekindle.profile.signature import OpCall, TensorSpec, signature
from rekindle.profile.stage import ProfileListener, ProfileProgress, estimate_nodes, profile_nodes
from rekindle.profile.step import Prediction, StepMeasurement, measure_step

__all__ = [
    "HEADROOM",
    "DeviceBudget",
    "DeviceDescription",
    "OpCall",
    "OpProfile",
    "Prediction",
    "Predictor",
    "Profile",
    "ProfileListener",
    "ProfileProgress",
    "Residents",
    "Source",
    "StepMeasurement",
    "TensorSpec",
    "blocks_of",
    "charged_nodes",
    "device_budget",
    "device_name",
    "device_names",
    "estimate_nodes",
    "load_device",
    "measure_step",
    "profile_nodes",
    "residents_of",
    "signature",
    "value_bytes",
]
