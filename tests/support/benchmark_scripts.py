"""Scripts of benchmarks/ as modules, so that tests can call what is in them."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).parents[2] / "benchmarks"


def load_script(path: str) -> ModuleType:
    """The script at this path below benchmarks/, under a name that no package has."""
    name = "benchmarks_" + path.removesuffix(".py").replace("/", "_")
    spec = importlib.util.spec_from_file_location(name, FOLDER / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
