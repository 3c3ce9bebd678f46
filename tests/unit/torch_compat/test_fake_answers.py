"""What a fake mode keeps of its answers is used in each release of torch that is supported."""

import pytest
import torch

from rekindle.torch_compat import KeptAnswers, fake_tensors, new_fake_mode

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
