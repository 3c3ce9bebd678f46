"""recorded `JointGraph` -> rewritten `JointGraph`: one flat list of passes over one copy.

`PASSES` is the list, in the order in which the passes run. A pass that is added to it is run; there
is nothing else to touch. Each stands beside the condition under which what it puts in is bitwise
identical to what eager computes; where it does not hold, the pass leaves the ops as they are.

The copy is made in two parts. Passes of the forward see the forward alone: what they decide must
not depend on the backward, since another backward may be asked for later (`beside`), and must find
the forward that has run. Then the backward is copied behind it. What was recorded is left as it is.

Limits: a pass knows the ops of eager by name and finds no others; the passes run once, in order,
and none is repeated because a later one has made room for it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from torch import fx

from rekindle.capture import JointGraph
from rekindle.capture.gc_pause import collector_at_rest
from rekindle.capture.joint import Origin
from rekindle.rewrite import graph_edit
from rekindle.rewrite.cross_entropy import join_loss_gradients
from rekindle.rewrite.elementwise_fusion import fuse_elementwise
from rekindle.rewrite.graph_edit import GraphEdit, copy_nodes
from rekindle.rewrite.layer_norm import norm_backward, norm_forward
from rekindle.rewrite.masked_softmax import mask_in_one_pass
from rekindle.rewrite.packed_attention import pack_gradients, read_in_place, read_in_place_backward
from rekindle.rewrite.redundant_copies import shorten_copies
from rekindle.rewrite.split_norm_dropout import split_ops
from rekindle.rewrite.transpose_copies import transpose_in_tiles, transpose_in_tiles_backward
from rekindle.torch_compat import outside_modes

Part = Literal["forward", "backward", "step"]


@dataclass(frozen=True, slots=True)
class Pass:
    """One rewrite, and when it is exact."""

    name: str
    part: Part  # what it works on: the forward before there is a backward, that backward, or both
    run: Callable[[GraphEdit], None]
    does: str
    # The condition under which the bits are eager's, and how it is known to hold: the function that
    # sees to it, as `module.name` of this room.
    exact: str
    cuda: bool = False  # changes nothing on other devices
    fuses: bool = False  # left out with `fuse=False`
    # Left out where sizes change: it computes with whole numbers, which would be those of one call.
    # So is all that is `cuda`: its kernels are compiled, and tried, for one shape.
    one_shape: bool = False
    # Left out where Python asked the data for a number while the forward was recorded.
    without_scalars: bool = False


# The order matters: what takes ops apart comes before what joins them, a backward pass after the
# forward pass that it follows, and `packed_attention` after `redundant_copies`, which makes the
# `rekindle::stacked` that it joins. Elementwise fusion is last: it works on what all others left,
# and puts back what found no partner.
PASSES: tuple[Pass, ...] = (
    Pass(
        "split_norm_dropout",
        "forward",
        split_ops,
        does="Takes batch norm and dropout apart, so that their outputs are cheap to recompute.",
        exact="The op's own kernel is tried on the device: what is made from its statistics "
        "(`split_norm_dropout._form`), or from its mask (`split_norm_dropout._is_product`), has "
        "the same numbers.",
        cuda=True,
        fuses=True,
        without_scalars=True,
    ),
    Pass(
        "masked_softmax",
        "forward",
        mask_in_one_pass,
        does="Softmax of scores with wholly masked rows in one pass more, not four.",
        exact="Softmax is torch's own kernel; only rows that it gives NaN for are read again. "
        "Tried on the device for each dtype (`masked_softmax._works`).",
        cuda=True,
        fuses=True,
        without_scalars=True,
    ),
    Pass(
        "transpose_copies",
        "forward",
        transpose_in_tiles,
        does="Copies and sums of transposed tensors read and write whole lines of memory.",
        exact="A copy changes no bits and a sum rounds once. Tried on the device for each dtype "
        "(`transpose_copies._works`).",
        cuda=True,
        fuses=True,
        without_scalars=True,
    ),
    Pass(
        "layer_norm",
        "forward",
        norm_forward,
        does="Layer norm with a warp per row, which may be joined to the sum before it.",
        exact="Sums are made in the order of torch's kernels. Tried on the device for each dtype "
        "and length of a row (`layer_norm._works`).",
        cuda=True,
        fuses=True,
        without_scalars=True,
    ),
    Pass(
        "read_in_place",
        "forward",
        read_in_place,
        does="Attention reads queries, keys and values where they are, not copies of them.",
        exact="The same kernel reads the same numbers with other strides, which are aligned to "
        "16 bytes (`packed_attention._layout`), so that torch chooses no other kernel.",
        cuda=True,
        fuses=True,
        without_scalars=True,
    ),
    Pass(
        "cross_entropy",
        "backward",
        join_loss_gradients,
        does="The backward of cross-entropy without its second tensor of the logits' size.",
        exact="The same two kernels run on a few rows at a time "
        "(`cross_entropy._backward_over`), and each row's result depends on that row alone.",
    ),
    Pass(
        "redundant_copies",
        "backward",
        shorten_copies,
        does="Copies of copies read the first source, and parts of a gradient are written once.",
        exact="A copy changes no bits (`redundant_copies.is_copy`); where padded gradients were "
        "added up, zero is still added (`redundant_copies._stacked`).",
        one_shape=True,
    ),
    Pass(
        "read_in_place_backward",
        "backward",
        read_in_place_backward,
        does="Attention's backward reads what its forward read in place.",
        exact="As for `read_in_place`.",
        cuda=True,
        without_scalars=True,
    ),
    Pass(
        "packed_attention",
        "backward",
        pack_gradients,
        does="Attention's backward writes its three gradients into parts of one tensor.",
        exact="The same kernel writes with other strides. Tried on the device for each dtype "
        "(`packed_attention._works`).",
        cuda=True,
    ),
    Pass(
        "layer_norm_backward",
        "backward",
        norm_backward,
        does="Layer norm's backward in one pass, with the sum behind it.",
        exact="As for `layer_norm`.",
        cuda=True,
        fuses=True,
    ),
    Pass(
        "transpose_copies_backward",
        "backward",
        transpose_in_tiles_backward,
        does="As `transpose_copies`, in the backward.",
        exact="As for `transpose_copies`.",
        cuda=True,
        fuses=True,
    ),
    Pass(
        "elementwise_fusion",
        "step",
        fuse_elementwise,
        does="Chains of elementwise ops as one kernel each; puts back what was taken apart and "
        "found no partner.",
        exact="Every step of a kernel rounds as its op does. Each kernel is compared on the device "
        "with the separate ops, on random and on special numbers, before it is used "
        "(`elementwise_fusion._prepare`).",
        cuda=True,
        fuses=True,
    ),
)


def rewrite(
    joint: JointGraph, *, fuse: bool = True, beside: JointGraph | None = None
) -> JointGraph:
    """A copy of a recorded graph, rewritten by the passes that apply to it.

    `fuse=False` leaves out the passes with kernels of their own. `beside`: what `rewrite` gave
    for the same forward with another backward. The forward is then that one's, node by node, and
    the new backward reads what it makes.
    """
    with collector_at_rest(), outside_modes():
        passes = [p for p in PASSES if _applies(p, joint, fuse)]
        if beside is None:
            edit, copies = _copied_forward(joint, passes)
            forward = edit.nodes
        else:
            assert beside.origin is not None
            assert beside.origin.recorded.session is joint.session
            copies, forward = beside.origin.copies, beside.origin.forward_nodes
            edit = _edit(joint, beside.nodes[0].graph)
        # The forward is finished: from here on passes see it, and its nodes stay where they are.
        edit = replace(edit, forward=forward, num_before=len(edit.graph.nodes))
        copy_nodes(edit.graph, joint.nodes[len(joint.session.forward_nodes) :], copies)
        outputs = tuple(copies[node] for node in joint.outputs)
        gradients = tuple((copies[leaf], copies[made]) for leaf, made in joint.gradients)
        edit = replace(edit, results=(*outputs, *(made for _, made in gradients)))
        for each in passes:
            if each.part == "step" or (each.part == "backward" and not joint.forward_only):
                each.run(edit)
        return replace(
            joint,
            nodes=edit.nodes,
            entries=tuple(node and copies[node] for node in joint.entries),
            outputs=outputs,
            gradients=gradients,
            idle=tuple(copies[node] for node in joint.idle),
            origin=Origin(joint, copies, forward),
        )


def _applies(each: Pass, joint: JointGraph, fuse: bool) -> bool:
    if joint.changing is not None and (each.cuda or each.one_shape):
        return False
    return (fuse or not each.fuses) and not (each.without_scalars and joint.scalars)


def _edit(joint: JointGraph, graph: fx.Graph) -> GraphEdit:
    # The recorder numbers new storages too: those of a backward recorded later differ from them.
    new_storage = joint.session.recorder.new_storage
    return GraphEdit(graph, new_storage, graph_edit.MIN_NUMEL, graph_edit.ANYWHERE)


def _copied_forward(
    joint: JointGraph, passes: list[Pass]
) -> tuple[GraphEdit, dict[fx.Node, fx.Node]]:
    copies: dict[fx.Node, fx.Node] = {}
    edit = _edit(joint, fx.Graph())
    copy_nodes(edit.graph, joint.session.forward_nodes, copies)
    for each in passes:
        if each.part == "forward":
            each.run(edit)
    return edit, copies
