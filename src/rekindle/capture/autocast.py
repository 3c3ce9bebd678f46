"""What autocast would do to ops now, as a value: told, compared, and set again."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


def autocast_state() -> tuple[Any, ...]:
    """What autocast would do to ops now: part of a call's signature."""
    return tuple(
        [
            (device, torch.get_autocast_dtype(device))
            for device in ("cpu", "cuda")
            if torch.is_autocast_enabled(device)
        ]
    )


def set_autocast(state: tuple[Any, ...]) -> None:
    """Autocast as `autocast_state` has told it."""
    wanted = dict(state)
    for device in ("cpu", "cuda"):
        torch.set_autocast_enabled(device, device in wanted)
        if device in wanted:
            torch.set_autocast_dtype(device, wanted[device])


@contextlib.contextmanager
def autocast_as(state: tuple[Any, ...]) -> Iterator[None]:
    """Autocast as `autocast_state` has told it; what it cached inside is gone afterwards."""
    wanted = dict(state)
    now = {d: (torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")}
    for device in now:
        torch.set_autocast_enabled(device, device in wanted)
        if device in wanted:
            torch.set_autocast_dtype(device, wanted[device])
    try:
        yield
    finally:
        if wanted:
            torch.clear_autocast_cache()
        for device, (enabled, dtype) in now.items():
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)
