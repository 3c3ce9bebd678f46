"""Sparse gradients, as `nn.Embedding(sparse=True)` makes them: a call that puts indices and values,
which are dense and of known sizes, into one sparse tensor at the end of a backward."""

from collections.abc import Sequence

import torch

aten = torch.ops.aten

MAKES_SPARSE = aten._sparse_coo_tensor_with_dims_and_tensors.default


def sparse_gradient(
    indices: torch.Tensor,
    values: torch.Tensor,
    num_sparse: int,
    num_dense: int,
    size: Sequence[int],
) -> torch.Tensor:
    """The sparse tensor of these parts. It holds them and not copies, as eager's does."""
    made: torch.Tensor = MAKES_SPARSE(
        *(num_sparse, num_dense, list(size), indices, values),
        dtype=values.dtype,
        layout=torch.sparse_coo,
        device=values.device,
    )
    return made


# What it is given lives on in what it makes: no other op may write its result over that.
sparse_gradient.keeps_arguments = True  # type: ignore[attr-defined]
