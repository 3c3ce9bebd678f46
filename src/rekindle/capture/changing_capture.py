"""A call whose sizes change -> `JointGraph` with symbols for them, compared with what is captured
without symbols: of the call itself, and of another that was planned before."""

from collections.abc import Callable

from rekindle.capture.agreement import disagreement
from rekindle.capture.changing_sizes import Sizes
from rekindle.capture.graph_follower import Follower
from rekindle.capture.joint import JointGraph, capture
from rekindle.capture.node_facts import facts, source_of
from rekindle.errors import CaptureError
from rekindle.torch_compat import GraphInput, NotASize, Reading, hint_of, pinned


def capture_changing(
    follower: Follower,
    reading: Reading,
    plain_follower: Callable[[], Follower],
    others: tuple[JointGraph, ...],
) -> JointGraph:
    """The joint graph of a call that was read with symbols. Raises where, for the sizes of this
    call or for those of `others`, it is not what is captured without symbols."""
    joint = capture(follower, reading.graph, reading.inputs, reading.symbols)
    changing = joint.changing
    assert changing is not None
    if all(pinned(changing.symbols, name) for name in changing.names):
        raise NotASize("what runs is for these sizes alone")
    inputs = [GraphInput(i.expression, hint_of(i.value), i.stand_in) for i in reading.inputs]
    plain = capture(plain_follower(), reading.graph, inputs)
    seen = [(changing.traced, plain)]
    for other in others:
        if [s.value for s in other.scalars] != [s.value for s in joint.scalars]:
            continue  # its data led another way
        sizes = _sizes_of(joint, other)
        if sizes is not None and changing.conditions().hold(sizes):
            seen.append((sizes, other))
    for sizes, graph in seen:
        differs = _recorded_alike(joint, graph, sizes)
        if differs is not None:
            shown = ", ".join(map(str, sizes))
            raise CaptureError(f"for the sizes {shown} eager takes another way: {differs}")
    return joint


def _recorded_alike(joint: JointGraph, plain: JointGraph, sizes: Sizes) -> str | None:
    return disagreement(joint, plain.recorded, sizes)


def _sizes_of(joint: JointGraph, other: JointGraph) -> Sizes | None:
    """The sizes of another capture of the same model; None where its arguments are others."""
    assert joint.changing is not None
    shapes = {}
    for node in other.nodes:
        if node.op == "placeholder":
            shapes[source_of(node).kind, source_of(node).name] = facts(node).value.shape
    found = []
    for i, dim in joint.changing.places:
        node = joint.entries[i]
        shape = None if node is None else shapes.get((source_of(node).kind, source_of(node).name))
        if shape is None or dim >= len(shape):
            return None
        found.append(int(shape[dim]))
    return tuple(found)
