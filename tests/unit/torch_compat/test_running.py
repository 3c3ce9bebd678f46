"""torch.utils.checkpoint inside a capture is plain code, in each release of torch."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from rekindle.errors import RekindleError
from rekindle.torch_compat import run_saved_regions_plainly, running


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a1_a_region_runs_once(use_reentrant):
    runs = []

    def region(x):
        runs.append(1)
        return x.exp().sin()

    x = torch.randn(4, requires_grad=True)
    with run_saved_regions_plainly():
        checkpoint(region, x, use_reentrant=use_reentrant).sum().backward()
    assert len(runs) == 1
    checkpoint(region, x, use_reentrant=use_reentrant).sum().backward()
    assert len(runs) == 3  # as it was before


def test_a_release_that_has_another_way(monkeypatch):
    name = running._generator_name()
    running._generator_name.cache_clear()
    monkeypatch.delattr(torch.utils.checkpoint, name)
    monkeypatch.delattr(torch.utils.checkpoint, name.removesuffix("_impl"), raising=False)
    with pytest.raises(RekindleError, match=r"checkpoint in another way than the tested releases"):
        running._generator_name()
