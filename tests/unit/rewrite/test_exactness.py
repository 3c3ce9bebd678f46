"""What all trials of kernels have in common: run once, compared number by number or bit by bit."""

import torch

from rekindle.rewrite.exactness import same_bits, same_numbers, tried_once

NAN = float("nan")


def test_a_trial_runs_once_per_key():
    runs = []

    @tried_once
    def works(dtype: torch.dtype, length: int) -> bool:
        runs.append((dtype, length))
        return length > 1

    assert works(torch.float32, 2)
    assert works(torch.float32, 2)
    assert not works(torch.float32, 1)
    assert runs == [(torch.float32, 2), (torch.float32, 1)]


def test_what_cannot_be_tried_does_not_work():
    @tried_once
    def works(length: int) -> bool:
        raise torch.OutOfMemoryError(f"{length} bytes")

    assert not works(1)


def test_numbers_and_bits():
    a = torch.tensor([1.0, 0.0, NAN])
    b = torch.tensor([1.0, -0.0, NAN])
    assert same_numbers([a], [b])
    assert not same_bits(a, b)
    assert same_bits(a, a.clone())
    assert same_bits(a.bfloat16(), a.bfloat16())
    assert not same_numbers([a], [a.double()])
    assert not same_numbers([a], [a[:2]])
    assert not same_numbers([a, a], [a, a + 1])
    assert not same_bits(a, a.bfloat16())
