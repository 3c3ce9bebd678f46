"""What is known of each node of a recorded graph, as one typed record per node.

The record hangs on the fx node under one key of `node.meta`. Records are immutable: a copy of a
graph shares them with the original, and who changes what is known of a node gives it another one.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import fx

Kind = Literal["parameter", "buffer", "input", "constant", "tangent"]
Phase = Literal["forward", "backward"]

NO_STORAGE = -1
_KEY = "rekindle"


@dataclass(frozen=True, slots=True)
class Source:
    """Where the tensor of a placeholder comes from at each call."""

    kind: Kind
    name: str
    index: int  # among the sources of its kind


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """What is known of a node: of a placeholder, of a call, or of one output of a call."""

    value: Any = None  # the tensor without data that it stands for, or a sequence of them
    # The storage of a tensor that the node makes or shows, numbered in order of appearance: the
    # same model gives the same problem every time. None of its own has a call with several
    # outputs, and an in-place op, which gives back its argument.
    storage: int = NO_STORAGE
    storage_bytes: int = 0
    writes: tuple[fx.Node, ...] = ()  # the arguments that the call writes into
    phase: Phase | None = None  # None of a placeholder
    # Of the autograd node that the forward op makes, or whose backward this is: what pairs the two.
    sequence_nr: int = -1
    module: str = ""  # path of the module whose forward, or whose backward, runs
    where: str = ""  # the model's source line
    source: Source | None = None  # of a placeholder
    # Left by rewrites for what comes after them:
    with_sum: bool = False  # a layer norm that may run in one kernel with the sum that it reads
    read_in_place: bool = False  # a copy that attention does without


def facts(node: fx.Node) -> NodeFacts:
    """What is known of a node of a recorded graph."""
    found: NodeFacts = node.meta[_KEY]
    return found


def has_facts(node: fx.Node) -> bool:
    """Whether anything is known of a node."""
    return _KEY in node.meta


def set_facts(node: fx.Node, known: NodeFacts) -> None:
    """Puts a record in the place of what was known of the node."""
    node.meta[_KEY] = known


def view_facts(reader: NodeFacts, shown: NodeFacts, value: Any) -> NodeFacts:
    """Of a view that is made for a reader: it belongs where that one does, and shows a tensor."""
    return replace(
        reader,
        value=value,
        storage=shown.storage,
        storage_bytes=shown.storage_bytes,
        writes=(),
    )


def source_of(placeholder: fx.Node) -> Source:
    """Where the tensor of a placeholder comes from."""
    source = facts(placeholder).source
    assert source is not None
    return source
