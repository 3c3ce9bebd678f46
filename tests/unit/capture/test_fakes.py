"""Ops on fake tensors by the short way give what the dispatcher's way gives."""

import itertools

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from rekindle.capture.fake_tensors import FakeRuns, stand_in
from rekindle.torch_compat import new_fake_mode, python_references, storage_key

aten = torch.ops.aten


def facts(out):
    if isinstance(out, (list, tuple)):
        return [facts(x) for x in out]
    if not isinstance(out, torch.Tensor):
        return out
    layout = (tuple(out.shape), out.stride(), out.storage_offset(), out.dtype, out.device)
    bits = (out.requires_grad, out.is_conj(), out.is_neg(), out.untyped_storage().nbytes())
    return (*layout, *bits, type(out))


@pytest.fixture
def mode():
    with new_fake_mode() as mode:
        yield mode


CALLS = {
    "mm": lambda: (aten.mm.default, (torch.empty(3, 4), torch.empty(4, 5)), {}),
    "add": lambda: (aten.add.Tensor, (torch.empty(3, 4), torch.empty(4)), {"alpha": 2}),
    "transposed": lambda: (aten.add.Tensor, (torch.empty(3, 4).t(), 1), {}),
    "view": lambda: (aten.view.default, (torch.empty(3, 4), [4, 3]), {}),
    "unsafe": lambda: (aten._unsafe_view.default, (torch.empty(3, 4), [2, 6]), {}),
    "ones": lambda: (aten.view.default, (torch.empty(3, 4), [3, 1, 4]), {}),
    "slice": lambda: (aten.slice.Tensor, (torch.empty(3, 4)[1:], 1, 1, 3), {}),
    "split": lambda: (aten.split.Tensor, (torch.empty(6, 4), 2), {}),
    "cat": lambda: (aten.cat.default, ([torch.empty(3, 4), torch.empty(2, 4)],), {}),
    "norm": lambda: (
        aten.native_layer_norm.default,
        (torch.empty(3, 4), [4], None, None, 1e-5),
        {},
    ),
    "max": lambda: (aten.max.dim, (torch.empty(3, 4), 1), {}),
    "cast": lambda: (aten._to_copy.default, (torch.empty(3),), {"dtype": torch.float64}),
    "made": lambda: (aten.full.default, ([2, 2], 1), {"device": torch.device("cpu")}),
    "conj": lambda: (aten._conj.default, (torch.empty(3, dtype=torch.complex64),), {}),
    "random": lambda: (aten.bernoulli.p, (torch.empty(3, 4), 0.5), {}),
}


@pytest.mark.parametrize("name", CALLS)
def test_same_as_the_dispatcher(name, mode):
    run = FakeRuns(mode)
    func, args, kwargs = CALLS[name]()
    expected = func(*args, **kwargs)
    for _ in range(3):  # asked, learned, remembered
        out = run(func, (), args, kwargs)
        assert facts(out) == facts(expected)
        old = {storage_key(t) for t in args if isinstance(t, torch.Tensor)}
        for mine, theirs in zip(flat(out), flat(expected), strict=True):
            assert (storage_key(mine) in old) == (storage_key(theirs) in old)


def flat(out):
    return list(out) if isinstance(out, (list, tuple)) else [out]


def test_in_place_gives_back_its_argument(mode):
    run, x = FakeRuns(mode), torch.empty(3, 4)
    for _ in range(3):
        assert run(aten.add_.Tensor, (), (x, 1), {}) is x
        assert run(aten.mul.out, (), (x, 2), {"out": x}) is x


def test_what_python_calls_equal_is_told_apart(mode):
    """1, 1.0 and True; layouts; a default dtype that changes in between."""
    run, whole = FakeRuns(mode), torch.empty(3, dtype=torch.int64)
    for _ in range(2):
        kinds = [run(aten.add.Scalar, (), (whole, one), {}).dtype for one in (1, 1.0, True)]
        assert kinds == [torch.int64, torch.float32, torch.int64]
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        assert run(aten.add.Scalar, (), (whole, 1.0), {}).dtype is torch.float64
    finally:
        torch.set_default_dtype(before)
    shapes = [(2, 3, 4), (2, 4, 3), (4, 3, 2)]
    for shape, order in itertools.product(shapes, itertools.permutations(range(3))):
        x = torch.empty(shape).permute(order)
        assert facts(run(aten.relu.default, (), (x,), {})) == facts(aten.relu.default(x))


def test_another_mode_takes_part(mode):
    class Doubled(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.seen += 1
            return func(*args, **(kwargs or {}))

    run, x = FakeRuns(mode), torch.empty(3)
    with Doubled() as doubled:
        for _ in range(3):
            run(aten.relu.default, (), (x,), {})
    assert doubled.seen == 3


def test_errors_are_the_models_own(mode):
    run = FakeRuns(mode)
    for _ in range(2):
        with pytest.raises(RuntimeError):
            run(aten.mm.default, (), (torch.empty(3, 4), torch.empty(3, 4)), {})
    assert torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is mode


def test_references_from_python_alone_are_counted():
    one, other = torch.empty(3), torch.empty(3)
    views = [one.view(3), one.view(3)]
    assert python_references(one) == python_references(other)
    table = [one]
    assert python_references(one) == python_references(other) + 1
    assert views
    assert table


def _leaves() -> dict[str, torch.Tensor]:
    with_gradient = nn.Parameter(torch.randn(3))
    with_gradient.grad = torch.ones(3)
    whole = torch.randn(4, 6)
    return {
        "parameter": nn.Parameter(torch.randn(3, 4)),
        "frozen": nn.Parameter(torch.randn(3), requires_grad=False),
        "tensor": torch.randn(2, 1, 5),
        "buffer": nn.Buffer(torch.randn(3)),
        "leaf": torch.randn(3, requires_grad=True),
        "whole numbers": torch.tensor(3),
        "empty": torch.empty(0, 4),
        "complex": torch.randn(3, dtype=torch.complex64),
        "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "expanded": torch.randn(1, 3).expand(4, 3),
        "with a gradient": with_gradient,
        "whole": whole,
        "its columns": whole[:, 2:],
        "a parameter of its rows": nn.Parameter(whole[1:3]),
        "the same as a parameter": nn.Parameter(whole),
        "shorter than its storage": torch.randn(8)[:4],
        "negated": torch.randn(3, dtype=torch.complex64).conj().imag,
    }


def test_a_stand_in_is_what_the_converter_makes() -> None:
    ours, torchs, leaves = new_fake_mode(), new_fake_mode(), _leaves()
    made = {name: stand_in(ours, real) for name, real in leaves.items()}
    expected = {name: torchs.from_tensor(real, static_shapes=True) for name, real in leaves.items()}

    def told(fake: torch.Tensor) -> tuple[object, ...]:
        layout = (fake.shape, fake.stride(), fake.storage_offset(), fake.dtype, fake.device)
        kinds = (fake.requires_grad, fake.is_leaf, fake.is_conj(), fake.is_neg(), fake.grad is None)
        size = fake.untyped_storage().nbytes()
        return (*layout, *kinds, size, isinstance(fake, nn.Parameter))

    for name, fake in made.items():
        assert told(fake) == told(expected[name]), name
        assert ours.from_tensor(leaves[name], static_shapes=True) is fake, name
    for one, other in itertools.combinations(leaves, 2):
        shared = storage_key(expected[one]) == storage_key(expected[other])
        assert (storage_key(made[one]) == storage_key(made[other])) == shared, (one, other)
