"""How much Python runs per op of a model while it is planned: counted, not timed.

Planning a model again takes the time to capture it, and that is Python. The bounds stand a quarter
above what was counted on torch 2.13; a walk of all arguments more, or a walk of all ops per op,
does not fit under them.
"""

import gc
import sys

import pytest
import torch
import torch.nn.functional as F
from support.recording import capture
from torch import nn

from rekindle.capture.gc_pause import collector_at_rest
from rekindle.core import Schedule
from rekindle.lower.emit import emit
from rekindle.profile.profiler import distinct_calls
from rekindle.program import analyse


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.into, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        q, k, v = self.into(self.norm1(x))[:, None].chunk(3, -1)
        x = x + F.dropout(self.out(F.scaled_dot_product_attention(q, k, v)[:, 0]), 0.1)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def counted(function):
    """What it returns, and how many Python functions it called."""
    num = 0

    def listen(_frame, event, _arg):
        nonlocal num
        num += event == "call"

    before = sys.getprofile()
    sys.setprofile(listen)
    try:
        result = function()
    finally:
        sys.setprofile(before)
    return result, num


def costs(depth):
    """Calls per op of the capture, of what is made of it, and of lowering; each of a second run."""
    torch.manual_seed(0)
    model, x = nn.Sequential(*[Block(16) for _ in range(depth)]), torch.randn(2, 8, 16)
    capture(model, (x,))
    joint, captured = counted(lambda: capture(model, (x,)))
    program, analysed = counted(lambda: analyse(joint))
    _, keyed = counted(lambda: distinct_calls(joint.nodes))
    schedule = Schedule(tuple(range(len(program.ops))))
    emit(program, schedule)
    _, lowered = counted(lambda: emit(program, schedule))
    num_ops = sum(node.op == "call_function" for node in joint.nodes)
    return num_ops, captured, analysed, keyed, lowered


def test_calls_per_op():
    # 215, 20, 26 and 64 when this was written; 475, 19, 41 and 214 before anyone had counted.
    num_ops, captured, analysed, keyed, lowered = costs(6)
    assert captured <= 270 * num_ops
    assert analysed <= 25 * num_ops
    assert keyed <= 40 * num_ops
    assert lowered <= 85 * num_ops


def test_nothing_grows_faster_than_the_model():
    small, large = costs(3), costs(9)
    ops, *work = [b - a for a, b in zip(small, large, strict=True)]
    for more, before in zip(work, small[1:], strict=True):
        assert more / ops <= 1.1 * before / small[0]


@torch.library.custom_op("rekindle_tests::asks", mutates_args=())
def asks(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@asks.register_fake
def _(x):
    ANSWERS.append(gc.isenabled())
    return torch.empty_like(x)


asks.register_autograd(lambda _ctx, gradient: gradient)


class Asks(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        return self.inner(asks(x))


ANSWERS: list[bool] = []


def test_the_collector_rests_while_a_model_is_captured():
    ANSWERS.clear()
    assert gc.isenabled()
    capture(Asks(), (torch.randn(2, 4),))
    assert ANSWERS
    assert not any(ANSWERS)
    assert gc.isenabled()


def test_the_collector_is_left_as_it_was():
    with pytest.raises(ZeroDivisionError), collector_at_rest():
        raise ZeroDivisionError
    assert gc.isenabled()
    with collector_at_rest():
        with collector_at_rest():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.disable()
    try:
        with collector_at_rest():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
