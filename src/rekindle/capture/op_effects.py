"""What an op does besides computing: random numbers, mutation, aliases, and what must run once."""

import functools
from typing import Any

import torch
from torch import fx

from rekindle.torch_compat import is_overload

aten = torch.ops.aten

# These update running statistics in place without saying so in their schema: the positions of
# (running_mean, running_var, training). Run again with None for both, they give the same outputs
# and leave the statistics alone.
_STATISTICS: dict[Any, tuple[int, int, int | None]] = {
    aten.native_batch_norm.default: (3, 4, 5),
    aten.cudnn_batch_norm.default: (3, 4, 5),
    aten.miopen_batch_norm.default: (3, 4, 5),
    aten._native_batch_norm_legit.default: (3, 4, 5),
    aten._batch_norm_with_update.default: (3, 4, None),
    # SyncBatchNorm's, on a GPU.
    aten.batch_norm_gather_stats.default: (3, 4, None),
    aten.batch_norm_gather_stats_with_counts.default: (3, 4, None),
    aten.batch_norm_update_stats.default: (1, 2, None),
}

# Never run twice: other ranks take part, or the world outside the graph is touched.
_ONCE_NAMESPACES = frozenset({"_c10d_functional", "_c10d_functional_autograd", "c10d", "_dtensor"})

RECURRENT_DROPOUT = (
    "cuDNN's dropout between recurrent layers keeps a random state of its own, which cannot be "
    "replayed; set dropout=0 in the recurrent layer and put nn.Dropout around it, or manage the "
    "rest of the model"
)
RECURRENT_FORMS = (
    "cuDNN's recurrent layers cannot be planned on packed sequences or inside autocast; pad and "
    "mask instead, leave autocast around the layer (torch.autocast(..., enabled=False)), or manage "
    "the rest of the model"
)

# Ops with a state that outlives the call and that nothing outside can save or put back, and ops
# that torch cannot describe without data. (What can be planned of cuDNN's recurrent layers is in
# `recurrent`.)
REFUSED = {
    aten._cudnn_init_dropout_state.default: RECURRENT_DROPOUT,
    aten._cudnn_rnn.default: RECURRENT_FORMS,
}

# Scalars that Python asked for; answered at capture and guarded.
SCALAR_OPS = frozenset(
    {
        aten._local_scalar_dense.default,
        aten.equal.default,
        aten.is_nonzero.default,
        aten.allclose.default,
    }
)


def is_random(target: Any) -> bool:
    """Whether the op draws from a random number generator."""
    return is_overload(target) and torch.Tag.nondeterministic_seeded in target.tags


def runs_once(target: Any) -> bool:
    """Must not be executed twice, whatever the schedule would like."""
    if not is_overload(target):
        return bool(getattr(target, "runs_once", False))  # a hook of the model's
    return target.namespace in _ONCE_NAMESPACES


def statistics_positions(node: fx.Node) -> tuple[int, ...]:
    """Positions of the running statistics that this call updates; () where it updates none."""
    found = _STATISTICS.get(node.target)
    if found is None:
        return ()
    mean, var, training = found
    if training is not None and not node.args[training]:
        return ()
    return tuple(p for p in (mean, var) if isinstance(node.args[p], fx.Node))


def statistics_of(node: fx.Node) -> tuple[fx.Node, ...]:
    """The running statistics that this call updates."""
    return tuple(node.args[p] for p in statistics_positions(node))


@functools.cache
def _written_arguments(target: Any) -> tuple[tuple[int, str], ...]:
    """Position and name of each argument that the schema of an overload says is written to."""
    return tuple(
        (position, argument.name)
        for position, argument in enumerate(target._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def written_nodes(node: fx.Node) -> tuple[fx.Node, ...]:
    """The tensor arguments that this call writes to."""
    if not is_overload(node.target):
        return ()
    found: list[fx.Node] = list(statistics_of(node))
    for position, name in _written_arguments(node.target):
        value = node.args[position] if position < len(node.args) else node.kwargs.get(name)
        for leaf in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(leaf, fx.Node) and leaf not in found:
                found.append(leaf)
    return tuple(found)
