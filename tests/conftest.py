"""Settings of all tests."""

import importlib.machinery
import importlib.util
import os
import signal
import sys
import tempfile
import threading
from pathlib import Path

import pytest

# Two workers with two threads each on two cores only get in each other's way; and one thread makes
# CPU results independent of how work was split.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
# Measurements of a test run are of no use to anybody else.
os.environ["REKINDLE_CACHE_DIR"] = tempfile.mkdtemp(prefix="rekindle-tests-")

# A shell that is not interactive starts what runs in its background with SIGINT ignored, and so
# would be all that is started from here; the tests of Ctrl-C need it.
if threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)

if importlib.util.find_spec("hypothesis") is not None:  # a GPU machine may have torch alone
    from hypothesis import settings

    # Every run tests the same cases, so a red run can be repeated; HYPOTHESIS_PROFILE=explore
    # looks for new ones.
    settings.register_profile("repeatable", deadline=None, derandomize=True, print_blob=True)
    settings.register_profile("explore", deadline=None, max_examples=2000, print_blob=True)
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))

INSTANCES = Path(__file__).parent / "instances"


@pytest.fixture
def instances() -> Path:
    """The folder of the public instances."""
    return INSTANCES


class TorchvisionOnCpu:
    """Makes torchvision importable where torch has no CUDA.

    The wheel of torchvision on PyPI is built for CUDA: with a CPU torch its library of operators
    cannot load, and importing it fails with "operator torchvision::nms does not exist", which
    breaks timm, and transformers and diffusers once torchvision is installed. Declaring the two
    operators is enough for everything but detection. Done when torchvision is first imported, so
    that tests without torch never load torch.
    """

    def __init__(self) -> None:
        self.library: object = None  # the operators live as long as this

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name != "torchvision":
            return
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("torchvision")
        if spec is not None:
            self.declare_operators(spec)

    def declare_operators(self, spec: importlib.machinery.ModuleSpec) -> None:
        import torch

        for folder in spec.submodule_search_locations or ():
            for library in Path(folder).glob("_C*.so"):
                try:
                    torch.ops.load_library(str(library))
                except OSError:
                    continue
                return
        self.library = torch.library.Library("torchvision", "DEF")
        for op in ("nms", "qnms"):
            self.library.define(f"{op}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


TORCHVISION_ON_CPU = TorchvisionOnCpu()  # kept here: it holds the operators
sys.meta_path.insert(0, TORCHVISION_ON_CPU)


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Where pytest-timeout is not installed (a bare GPU machine), its setting is still known."""
    if not pluginmanager.hasplugin("timeout"):
        parser.addini("timeout", "seconds after which a test fails; needs pytest-timeout")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that takes `device` runs on each device there is; `-m gpu` selects those on a GPU."""
    if "device" not in metafunc.fixturenames:
        return
    import torch

    devices = ["cpu"]
    if torch.cuda.is_available():
        devices.append(pytest.param("cuda", marks=pytest.mark.gpu))
    metafunc.parametrize("device", devices, indirect=True)


@pytest.fixture
def device(request: pytest.FixtureRequest):
    """Deterministic kernels where a GPU has them."""
    import torch

    if request.param == "cuda":
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.backends.cudnn.benchmark = False
        torch.utils.deterministic.fill_uninitialized_memory = False
        yield torch.device("cuda", torch.cuda.current_device())
        torch.use_deterministic_algorithms(False)
    else:
        yield torch.device("cpu")
