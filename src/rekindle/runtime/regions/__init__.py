"""A model that cannot be read in one piece: submodules that can be are regions, and the Python
around them runs as it always did. One budget covers all of it: docs/internals/regions.md."""

from rekindle.runtime.regions.kinds import MadeRegion, RegionKind
from rekindle.runtime.regions.recording import RecordedCall, Recording
from rekindle.runtime.regions.regions import Regions, has_parts

__all__ = ["MadeRegion", "RecordedCall", "Recording", "RegionKind", "Regions", "has_parts"]
