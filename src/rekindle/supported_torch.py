"""Which releases of torch this release of Rekindle runs on; importing it refuses older ones.

`torch_compat` imports it before anything of torch. Releases of torch change private names, and,
worse, keep a name and give it another meaning: torch 2.14 did so with the code behind
`torch.utils.checkpoint`, and gradients were wrong without an error. A release newer than NEWEST is
therefore tried first (`self_check`), and refused if it fails.
"""

import contextlib
import os
import re
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

from rekindle.errors import RekindleError

OLDEST, NEWEST = (2, 11), (2, 15)  # all between are tested: `make matrix`
ANY_TORCH = "REKINDLE_ANY_TORCH"  # set to 1: try another release all the same


def release_of(installed: str) -> tuple[int, int]:
    """Major and minor; (0, 0) where there are none."""
    found = re.match(r"(\d+)\.(\d+)", installed)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def refuse_older(installed: str) -> None:
    """Raises RekindleError for a release of torch before OLDEST."""
    if release_of(installed) < OLDEST and not _any_torch():
        raise refusal(installed, "older releases lack what it needs")


def must_be_tried(installed: str) -> bool:
    """Whether a release of torch is newer than those that were tested."""
    return release_of(installed) > NEWEST and not _any_torch()


def refusal(installed: str, why: str) -> RekindleError:
    """The error for a release that is not used."""
    return RekindleError(
        f"torch {installed} is installed; this release of Rekindle is tested with {tested()}, and "
        f"{why}: pip install 'torch>={_dotted(OLDEST)},<{NEWEST[0]}.{NEWEST[1] + 1}', or set "
        f"{ANY_TORCH}=1 to try at your own risk"
    )


def tested() -> str:
    """The tested releases, for a message."""
    return f"{_dotted(OLDEST)} to {_dotted(NEWEST)}"


@contextlib.contextmanager
def missing_names_explained() -> Iterator[None]:
    """Imports of private names inside: where a release that was not tested lacks one, the error is
    the refusal."""
    try:
        yield
    except (ImportError, AttributeError) as error:
        installed = installed_torch()
        if not must_be_tried(installed):
            raise
        raise refusal(installed, f"this one lacks a name that it needs ({error})") from error


def installed_torch() -> str:
    """Read from the package's metadata, without importing torch where there is some."""
    try:
        return version("torch")
    except PackageNotFoundError:  # a build that was put on the path, or none: an ImportError then
        import torch

        return str(torch.__version__)


def _any_torch() -> bool:
    return os.environ.get(ANY_TORCH) == "1"


def _dotted(release: tuple[int, int]) -> str:
    return ".".join(map(str, release))


refuse_older(installed_torch())
