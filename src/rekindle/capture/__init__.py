"""From a model and a sample to the graph of one training step, on tensors without data."""

from rekindle.capture.joint import JointGraph, Tangent, capture
from rekindle.capture.program import Program, analyse

__all__ = ["JointGraph", "Program", "Tangent", "analyse", "capture"]
