"""How a kernel is launched, with a stand-in for the driver: what it is given, and what is done
about a thread without a context and about an error."""

import ctypes
from collections.abc import Callable

import pytest
import torch

from rekindle.torch_compat import CudaKernel

DRIVER = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, *[ctypes.c_uint] * 7, *[ctypes.c_void_p] * 3
)


class Compiled:
    func = ctypes.c_void_p(77)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[CudaKernel, list]]:
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 5, raising=False)

    def make(answers: list[int]) -> tuple[CudaKernel, list]:
        seen: list = []

        @DRIVER
        def driver(func, gx, gy, gz, bx, by, bz, shared, stream, params, extra):
            places = (ctypes.c_uint64 * 3).from_address(params)
            values = [ctypes.c_uint64.from_address(place).value for place in places]
            seen.append((func, (gx, gy, gz), (bx, by, bz), shared, stream, values, extra))
            return answers.pop(0)

        kernel = object.__new__(CudaKernel)
        kernel.device, kernel._kernel, kernel._launch = 0, Compiled(), driver
        return kernel, seen

    return make


def test_what_the_driver_is_given(launched) -> None:
    kernel, seen = launched([0])
    kernel(9, [2**40 + 16, 3, 2**33])
    assert seen == [(77, (9, 1, 1), (256, 1, 1), 0, 5, [2**40 + 16, 3, 2**33], None)]


def test_a_thread_without_a_context_gets_one(launched, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(torch._C, "_cuda_setDevice", chosen.append, raising=False)
    kernel, seen = launched([201, 0])
    kernel(1, [1, 2, 3])
    assert chosen == [0]
    assert len(seen) == 2


def test_an_error_is_told(launched) -> None:
    kernel, _ = launched([700])
    with pytest.raises(RuntimeError, match="error 700"):
        kernel(1, [1, 2, 3])
