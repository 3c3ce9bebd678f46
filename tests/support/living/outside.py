"""What a forward says and reads outside of Python's objects: warnings, prints, logs, the
environment, the clock (findings E3, E4)."""

import contextlib
import io
import logging
import os
import time
import warnings
from typing import Any

import torch
from support.living.cases import Living, Note, case
from torch import Tensor


@case("e3", breaks=True)
class WarnsInForward(Living):
    def middle(self, h: Tensor) -> Tensor:
        warnings.warn("the model says: deprecated", UserWarning, stacklevel=2)
        return h * 2


class Said(Living):
    """What the forward writes to the standard output is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def train_step(self, note: Note, args: Any, kwargs: Any) -> None:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            super().train_step(note, args, kwargs)
        self.said.append(out.getvalue())

    def observed(self) -> Any:
        return self.said


@case("e3", breaks=True)
class PrintsInForward(Said):
    def middle(self, h: Tensor) -> Tensor:
        print("shape", tuple(h.shape))
        return h * 2


@case("e3", breaks=True)
class PrintsANumber(Said):
    def middle(self, h: Tensor) -> Tensor:
        print(f"{h.detach().mean().item():.4f}")
        return h * 2


LOGGED: list[str] = []


class _Keeps(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        LOGGED.append(record.getMessage())


LOGGER = logging.getLogger("tests.living")
LOGGER.propagate = False
LOGGER.setLevel(logging.INFO)
LOGGER.addHandler(_Keeps())


@case("e3", breaks=True)
class LogsInForward(Living):
    def middle(self, h: Tensor) -> Tensor:
        LOGGER.info("shape %s", tuple(h.shape))
        return h * 2

    def observed(self) -> Any:
        return LOGGED

    def leave(self) -> None:
        LOGGED.clear()


@case("e4", breaks=True)
class ReadsTheEnvironment(Living):
    def middle(self, h: Tensor) -> Tensor:
        return h * 3 if os.environ.get("REKINDLE_TEST_LIVING") == "1" else h * 2

    def change(self) -> None:
        os.environ["REKINDLE_TEST_LIVING"] = "1"

    def leave(self) -> None:
        os.environ.pop("REKINDLE_TEST_LIVING", None)


@case("e4", breaks=True)
class ReadsTheClock(Living):
    def __init__(self) -> None:
        super().__init__()
        self.deadline = time.monotonic() + 1e6

    def middle(self, h: Tensor) -> Tensor:
        return h * 2 if time.monotonic() < self.deadline else h * 3

    def change(self) -> None:
        self.deadline = 0.0


@case("e3", breaks=True, steady=False)
class MeasuresItsTime(Living):
    """What is kept of the clock is a number; nothing is computed with it."""

    def __init__(self) -> None:
        super().__init__()
        self.times: list[float] = []

    def middle(self, h: Tensor) -> Tensor:
        started = time.perf_counter()
        h = torch.sin(h)
        self.times.append(time.perf_counter() - started)
        return h

    def observed(self) -> Any:
        return len(self.times)
