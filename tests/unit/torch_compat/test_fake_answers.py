"""What a fake mode keeps of its answers is used in each release of torch that is supported."""

import pytest
import torch

from rekindle.torch_compat import KeptAnswers, eager_layouts_answered, fake_tensors, new_fake_mode

aten = torch.ops.aten


def test_the_form_of_this_release_is_known():
    assert KeptAnswers(new_fake_mode()).usable


@pytest.mark.parametrize(
    ("func", "args"),
    [
        (aten.mm.default, lambda: (torch.empty(3, 4), torch.empty(4, 5))),
        (aten.view.default, lambda: (torch.empty(3, 4), [4, 3])),
        (aten.relu_.default, lambda: (torch.empty(3, 4),)),
    ],
    ids=["a new tensor", "a view", "in place"],
)
def test_an_answer_is_given_again(func, args):
    with new_fake_mode() as mode:
        answers = KeptAnswers(mode)
        given = args()
        out, kept = answers.ask(func, (), given, {})
        assert kept is not None
        again = answers.again(kept, func, given)
    assert (again.shape, again.stride()) == (out.shape, out.stride())
    shares = given[0].untyped_storage()._cdata
    assert (again.untyped_storage()._cdata == shares) == (out.untyped_storage()._cdata == shares)


def test_another_form_is_not_used(monkeypatch):
    monkeypatch.setattr(fake_tensors, "_TOLD", ())
    fake_tensors._told_of_an_answer.cache_clear()
    try:
        assert not KeptAnswers(new_fake_mode()).usable
    finally:
        fake_tensors._told_of_an_answer.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("width", [5, 6, 16])
def test_grouped_products_are_laid_out_as_in_eager(dtype, width):
    """torch's own kernel for fake tensors refuses float32, and on a CPU it does not pad rows."""
    ends = torch.tensor([3, 5, 8, 16], dtype=torch.int32)
    rows, columns = torch.randn(16, 16).to(dtype), torch.randn(width, 16).to(dtype).t()
    batch = torch.randn(4, 8, 16).to(dtype)
    many = torch.randn(4, width, 16).to(dtype).transpose(1, 2)
    for a, b, offs in (
        (rows, many, ends),
        (batch, many, None),
        (batch, columns, torch.tensor([1, 2, 4, width], dtype=torch.int32)),
        (rows.t(), torch.randn(16, 16).to(dtype), ends),
    ):
        real = torch._grouped_mm(a, b, offs=offs)
        with new_fake_mode() as mode, eager_layouts_answered():
            fake = torch._grouped_mm(
                *map(mode.from_tensor, (a, b)),
                offs=offs if offs is None else mode.from_tensor(offs),
            )
        assert (fake.dtype, fake.shape, fake.stride()) == (real.dtype, real.shape, real.stride())


def test_other_users_of_fake_tensors_get_torchs_own_answers():
    ends = torch.tensor([3, 5], dtype=torch.int32)
    with new_fake_mode(), pytest.raises(RuntimeError, match="BF16"):
        torch._grouped_mm(torch.randn(5, 8), torch.randn(2, 8, 8), offs=ends)
