"""Settings of all tests."""

import gc
import importlib
import importlib.util
import os
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support import torchvision_on_cpu

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


@pytest.fixture
def ctrl_c_after() -> Iterator[Callable[[float], None]]:
    """Presses Ctrl-C so many seconds from now.

    Python drops an exception that arises while garbage is collected, in a callback of the collector
    (hypothesis has one) or of a weak reference (Dynamo has some, of earlier tests): the interrupt
    of a test that happens to collect just then would be lost.
    """
    gc.collect()
    gc.disable()
    timers: list[threading.Timer] = []

    def press(seconds: float) -> None:
        timers.append(threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT)))
        timers[-1].start()

    yield press
    for timer in timers:
        timer.join()
    gc.enable()


@pytest.fixture
def fuse_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chains of elementwise ops are joined whatever their size, on a CPU too: there the separate
    ops stand in for the kernel."""
    fuse = importlib.import_module("rekindle.rewrite.elementwise_fusion")
    graph_edit = importlib.import_module("rekindle.rewrite.graph_edit")
    monkeypatch.setattr(graph_edit, "MIN_NUMEL", 64)
    monkeypatch.setattr(graph_edit, "ANYWHERE", True)
    monkeypatch.setattr(fuse, "_targets", {})


torchvision_on_cpu.install()


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
