"""What each op costs: its time, its temporary memory and the true size of its outputs.

Measured on the device (`measure`), or estimated from a device description (`estimate`), kept on
disk between runs (`cache`).
"""

from rekindle.plans.plan_record import Source
from rekindle.profile.base import OpProfile, Profile
from rekindle.profile.block_sizes import blocks_of
from rekindle.profile.cache import device_name
from rekindle.profile.device import DeviceDescription, device_names, load_device
from rekindle.profile.op_signature import OpCall, TensorSpec, signature
from rekindle.profile.profiler import (
    ProfileListener,
    ProfileProgress,
    estimate_nodes,
    profile_nodes,
)

__all__ = [
    "DeviceDescription",
    "OpCall",
    "OpProfile",
    "Profile",
    "ProfileListener",
    "ProfileProgress",
    "Source",
    "TensorSpec",
    "blocks_of",
    "device_name",
    "device_names",
    "estimate_nodes",
    "load_device",
    "profile_nodes",
    "signature",
]
