"""The environment of the tests: what later tests import can be imported."""


def test_torchvision_loads_beside_a_cpu_torch():
    """See TorchvisionOnCpu in conftest.py; without it the import fails."""
    from torchvision.ops import FrozenBatchNorm2d

    assert FrozenBatchNorm2d(3).weight.shape == (3,)
