"""What the tests that need torch share: devices, threads, determinism."""

import os
import tempfile

import pytest

# Two workers with two threads each on two cores only get in each other's way; and one thread makes
# CPU results independent of how work was split.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
# Measurements of a test run are of no use to anybody else.
os.environ["REKINDLE_CACHE_DIR"] = tempfile.mkdtemp(prefix="rekindle-tests-")


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
