"""From the graph of a call to the graph of one training step, recorded on fake tensors."""

from rekindle.capture.graph_follower import Follower, Names
from rekindle.capture.joint import JointGraph, Tangent, capture

__all__ = ["Follower", "JointGraph", "Names", "Tangent", "capture"]
