"""Which releases of torch this release of Rekindle runs on; importing it refuses the others.

`torch_compat` imports it before anything of torch: another release may lack the private names used
there, or, worse, have them with another meaning (torch 2.15 with a checkpoint inside the model:
wrong gradients, and no error).
"""

import os
import re
from importlib.metadata import PackageNotFoundError, version

from rekindle.errors import RekindleError

OLDEST, NEWEST = (2, 11), (2, 13)  # as pyproject.toml: torch>=2.11,<2.14
ANY_TORCH = "REKINDLE_ANY_TORCH"  # set to 1: try another release all the same


def refuse_untested(installed: str) -> None:
    """Raises RekindleError for a release of torch outside OLDEST to NEWEST."""
    found = re.match(r"(\d+)\.(\d+)", installed)
    release = (int(found[1]), int(found[2])) if found else (0, 0)
    if OLDEST <= release <= NEWEST or os.environ.get(ANY_TORCH) == "1":
        return
    oldest, newest = (".".join(map(str, bound)) for bound in (OLDEST, NEWEST))
    below = f"{NEWEST[0]}.{NEWEST[1] + 1}"
    if release > NEWEST:
        why = "newer releases can give wrong gradients without an error"
    else:
        why = "older releases lack what it needs"
    raise RekindleError(
        f"torch {installed} is installed; this release of Rekindle is tested with {oldest} to "
        f"{newest}, and {why}: pip install 'torch>={oldest},<{below}', or set {ANY_TORCH}=1 to "
        "try at your own risk"
    )


def installed_torch() -> str:
    """Read from the package's metadata, without importing torch where there is some."""
    try:
        return version("torch")
    except PackageNotFoundError:  # a build that was put on the path, or none: an ImportError then
        import torch

        return str(torch.__version__)


refuse_untested(installed_torch())
