"""How an operand lies under the elements of a result: every place finds the right number."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from rekindle.rewrite.kernels.elementwise import Place, place_of

CPU = torch.device("cpu")


def read(place: Place, i: int) -> int:
    """Where the kernel reads for the element at this position of the result's memory."""
    match place.kind:
        case "wide":
            return i
        case "row":
            return i // place.extent
        case "column":
            return i % place.extent
        case "channel":
            return i // place.extent % place.num_channels
    found, below = 0, 1
    for size, step in reversed(place.digits):
        found += i // below % size * step
        below *= size
    return found


@st.composite
def layouts(draw: st.DrawFn) -> tuple[list[int], list[int], torch.Tensor]:
    """A shape, an order of its dimensions, and an operand: laid out in some order, with gaps, and
    of size 1 in some dimensions."""
    shape = draw(st.lists(st.sampled_from([1, 2, 3, 8, 16]), min_size=1, max_size=4))
    order = draw(st.permutations(range(len(shape))))
    other = draw(st.permutations(range(len(shape))))
    stride, step = [0] * len(shape), draw(st.sampled_from([1, 1, 1, 2]))
    for d in reversed(other):
        stride[d] = step
        step *= shape[d] + draw(st.sampled_from([0, 0, 0, 8]))
    operand = torch.arange(step + 1).to(torch.float32).as_strided(shape, stride)
    for d in range(len(shape)):
        if draw(st.booleans()):
            operand = operand.narrow(d, 0, 1)
    while operand.dim() and operand.shape[0] == 1 and draw(st.booleans()):
        operand = operand[0]
    return shape, order, operand


@given(layouts())
def test_every_element_reads_its_own(given: tuple[list[int], list[int], torch.Tensor]) -> None:
    shape, order, operand = given
    place = place_of(operand, shape, order, CPU)
    if place is None:
        return
    expected = operand.expand(shape).permute(order).reshape(-1).tolist()
    base = operand.storage_offset()
    found = [read(place, i) + base for i in range(math.prod(shape))]
    assert found == expected  # each number is its own position
    if place.kind in ("wide", "column", "strided"):  # eight at once are eight together
        starts = found[::8]
        assert all(found[8 * k : 8 * k + 8] == list(range(a, a + 8)) for k, a in enumerate(starts))
        assert all(a % 8 == base % 8 for a in starts)
    else:
        assert all(len(set(found[k : k + 8])) == 1 for k in range(0, len(found), 8))


def test_kinds() -> None:
    def kind(operand: torch.Tensor, *shape: int, order: tuple[int, ...] | None = None) -> str:
        place = place_of(operand, shape, order or tuple(range(len(shape))), CPU)
        return "none" if place is None else place.kind

    last = (0, 2, 3, 1)  # channels last
    assert kind(torch.empty(2, 3, 8), 2, 3, 8) == "wide"
    assert kind(torch.empty(2, 4, 4, 16).permute(0, 3, 1, 2), 2, 16, 4, 4, order=last) == "wide"
    assert kind(torch.empty(16, 1, 1), 2, 16, 4, 4, order=last) == "column"
    assert kind(torch.empty(16, 1, 1), 2, 16, 4, 4) == "channel"
    assert kind(torch.empty(2, 16, 1, 1), 2, 16, 4, 4) == "row"
    assert kind(torch.empty(2, 16, 1, 1), 2, 16, 4, 4, order=last) == "strided"
    assert kind(torch.empty(1, 1, 5, 8), 2, 3, 5, 8, order=(0, 2, 1, 3)) == "strided"
    assert kind(torch.empty(2, 3, 16)[..., 8:], 2, 3, 8) == "strided"
    assert kind(torch.empty(2, 3, 16)[..., 4:12], 2, 3, 8) == "none"  # no whole vectors
    assert kind(torch.empty(2, 8, 16).transpose(1, 2), 2, 16, 8) == "none"  # turned
    assert kind(torch.empty(()), 2, 16, 8) == "none"
