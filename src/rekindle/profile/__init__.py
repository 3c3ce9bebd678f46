"""What each op costs: its time, its temporary memory and the true size of its outputs.

Measured on the device (`measure`), or estimated from a device description (`estimate`), kept on
disk between runs (`cache`).
"""

from rekindle.profile.base import OpProfile, Profile, Source
from rekindle.profile.device import DeviceDescription, device_names, load_device
from rekindle.profile.signature import OpCall, TensorSpec, signature
from rekindle.profile.stage import ProfileProgress, estimate_nodes, profile_nodes

__all__ = [
    "DeviceDescription",
    "OpCall",
    "OpProfile",
    "Profile",
    "ProfileProgress",
    "Source",
    "TensorSpec",
    "device_names",
    "estimate_nodes",
    "load_device",
    "profile_nodes",
    "signature",
]
