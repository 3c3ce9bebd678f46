"""A kernel is tried on a part of what it will run on: as the ops themselves do on that part."""

import pytest
import torch

from rekindle.rewrite.kernels.elementwise import Kernel, Place, Step

aten = torch.ops.aten
F32 = torch.float32


def kernel_of(batch: int, length: int, size: int, flat: tuple[int, ...]) -> Kernel:
    """(x * y) as a matrix, plus a row of numbers, then times a number per row."""
    shape = (batch, length, size)
    steps = [
        Step(aten.mul.Tensor, (("leaf", 0), ("leaf", 1)), (), F32, False),
        Step(aten.view.default, (("step", 0), flat), (), F32, True),
        Step(aten.add.Tensor, (("step", 1), ("leaf", 2)), (), F32, False),
        Step(aten.view.default, (("step", 2), shape), (), F32, True),
        Step(aten.mul.Tensor, (("step", 3), ("leaf", 3)), (), F32, False),
    ]
    wide = Place("wide", batch * length * size)
    places = [wide, wide, Place("column", size), Place("row", size)]
    return Kernel(steps, places, [F32] * 4, shape, (length * size, size, 1))


def operands_of(batch: int, length: int, size: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    shapes = [(batch, length, size), (batch, length, size), (size,), (batch, length, 1)]
    return [torch.randn(shape) for shape in shapes]


@pytest.mark.parametrize("first", [-1, 12 * 64])
def test_a_part_is_what_the_whole_begins_with(first: int, device: torch.device) -> None:
    kernel = kernel_of(12, 64, 32, (first, 32))
    operands = [o.to(device) for o in operands_of(12, 64, 32)]
    num = kernel.parts_of([o.shape for o in operands], 4096)
    assert num == 6  # of 4,096 elements each: twelve would be too small
    part = [o if o.dim() == 1 else o[: 12 // num] for o in operands]
    expected = kernel.separately(*operands)[: 12 // num]
    assert torch.equal(kernel.separately(*part, num_parts=num), expected)
    if device.type == "cuda":
        from rekindle.torch_compat import CudaKernel

        kernel.launch = CudaKernel(kernel.source(), kernel.name, device)
        assert torch.equal(kernel.part(*part, num_parts=num), expected)
        whole = kernel.part(*operands, num_parts=1)
        assert torch.equal(whole, kernel.separately(*operands))


def test_what_cannot_be_cut_is_tried_whole() -> None:
    shapes = [o.shape for o in operands_of(7, 64, 32)]
    assert kernel_of(7, 64, 32, (32, 7 * 64)).parts_of(shapes, 1) == 1  # 32 rows, not 7
    assert kernel_of(7, 64, 32, (7 * 64, 32)).parts_of(shapes, 10**9) == 1  # too small
    shapes = [o.shape for o in operands_of(7, 3, 32)]
    assert kernel_of(7, 3, 32, (21, 32)).parts_of(shapes, 1) == 1  # no whole blocks of threads
