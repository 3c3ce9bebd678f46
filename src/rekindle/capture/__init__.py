"""From a model and a sample to the graph of one training step, recorded on fake tensors."""

from rekindle.capture.joint import JointGraph, Tangent, capture

__all__ = ["JointGraph", "Tangent", "capture"]
