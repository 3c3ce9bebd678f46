"""Arguments that several commands take: their help, the functions that parse them, and the check of
an output path.

A parser of an argument raises `ArgumentTypeError`, which argparse prints as one sentence and exits
with code 2. Limits are checked here, so that a solver never sees a number that its library refuses.
"""

import argparse
import math
import os
from pathlib import Path

from rekindle.errors import FileError

MAX_SEED = 2**31 - 1  # solver libraries take a signed 32-bit seed
MAX_RANKS = 10**6
MAX_POINTS = 1000
MAX_STEPS = 1000

BUDGET_HELP = (
    "a whole number of bytes, a size with a unit (8GiB, 8GB), or a fraction of the keep-all peak, "
    'written with a point (0.5), or "min": the smallest that is found'
)
TIME_LIMIT_HELP = "seconds for the solver (default 60)"
SEED_HELP = "seed of the solver (default 0)"
GAP_HELP = (
    "end the search where the cost is proven to be within this share of the optimum (default "
    "0.001: 0.1 %%)"
)
JSON_HELP = "print one JSON object"
QUIET_HELP = "no progress on stderr"


def add_save_and_recompute(parser: argparse.ArgumentParser) -> None:
    """`--save` and `--recompute`: a user's decisions that the solver has to keep."""
    group = parser.add_argument_group(
        "force modules to be saved or recomputed",
        'PATTERN is a module path ("blocks.*.mlp"), an op ("aten.mm*") or both ("blocks.*::mm"); '
        "each option can be repeated",
    )
    for name, help_text in (
        ("--save", "run these ops once: never recompute them"),
        ("--recompute", "do not keep the results of these ops for the backward"),
    ):
        group.add_argument(name, metavar="PATTERN", action="append", default=[], help=help_text)


def seconds(text: str) -> float:
    """A time limit: finite and above 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    # `nan` fails every comparison, so it is refused here together with "inf" and "-1".
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a number of seconds above 0")
    return value


def share(text: str) -> float:
    """An argument from 0 up to 1."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(
            f"{text[:40]!r} is not a share from 0 up to 1; 0.001 is 0.1 %"
        )
    return value


def seed(text: str) -> int:
    """A solver's seed."""
    return _whole_number(text, 0, MAX_SEED)


def points(text: str) -> int:
    """How many points a trade-off curve has, its two ends included."""
    return _whole_number(text, 2, MAX_POINTS)


def ranks(text: str) -> int:
    """How many processes train together."""
    return _whole_number(text, 1, MAX_RANKS)


def steps(text: str) -> int:
    """How many steps the demo trains."""
    return _whole_number(text, 1, MAX_STEPS)


def _whole_number(text: str, smallest: int, largest: int) -> int:
    # `int` would accept "1_0", " 1 " and digits of other scripts, and takes quadratic time for a
    # text of many digits: both are refused before the call.
    digits = text.isascii() and text.isdigit() and len(text) <= len(str(largest))
    if not digits or not smallest <= int(text) <= largest:
        raise argparse.ArgumentTypeError(
            f"{text[:40]!r} is not a whole number from {smallest} to {largest}"
        )
    return int(text)


def check_writable(path: str) -> None:
    """Raises FileError where the path cannot be written. Called before the solver starts: minutes
    of work must not end at a folder that does not exist."""
    folder = Path(path).parent
    if Path(path).is_dir():
        raise FileError(f"{path} is a folder; expected the name of a file to write")
    if not folder.is_dir():
        raise FileError(f"{path} cannot be written: there is no folder {folder}; create it first")
    if not os.access(folder, os.W_OK):
        raise FileError(
            f"{path} cannot be written: the folder {folder} is read-only; choose another folder"
        )
