"""What the tests that need torch share: devices, threads, determinism."""

import os

import pytest

# Two workers with two threads each on two cores only get in each other's way; and one thread makes
# CPU results independent of how work was split.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Where pytest-timeout is not installed (a bare GPU machine), its setting is still known."""
    if not pluginmanager.hasplugin("timeout"):
        parser.addini("timeout", "seconds after which a test fails; needs pytest-timeout")


def _devices() -> list[str]:
    import torch

    return ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "device" in metafunc.fixturenames:
        metafunc.parametrize("device", _devices(), indirect=True)


@pytest.fixture
def device(request: pytest.FixtureRequest):
    """Each device of this machine in turn; deterministic kernels where a GPU has them."""
    import torch

    if request.param == "cuda":
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.backends.cudnn.benchmark = False
        torch.utils.deterministic.fill_uninitialized_memory = False
        yield torch.device("cuda", torch.cuda.current_device())
        torch.use_deterministic_algorithms(False)
    else:
        yield torch.device("cpu")
