"""Estimated costs: bytes moved and FLOPs over a device description (a roofline).

time = max(FLOPs / (rate x share), bytes / (bandwidth x share)), and at least one launch. FLOPs
come from `torch.utils.flop_counter` where it has a formula (matrix products, convolutions,
attention and their backwards); all other ops are counted by the bytes they read and write. A view
costs the device nothing.

`OP_COSTS` is the list of ops that need more than that. An op that is added to it is costed by it;
there is nothing else to touch.

Known limits: an estimate does not know which kernel a library picks, nor the workspace of that
kernel. Only the workspace that follows from an op's definition is counted.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch.utils import flop_counter

from rekindle.plans.plan_record import Source
from rekindle.profile.base import OpProfile
from rekindle.profile.block_sizes import Blocks, CpuBlocks, CudaBlocks
from rekindle.profile.device import DeviceDescription
from rekindle.profile.op_signature import OpCall, TensorSpec, map_specs, packet_of


@dataclass(frozen=True, slots=True)
class OpCost:
    """What the roofline does not know of an op. Every field has the default of an op that reads its
    inputs once, writes its outputs once, and needs no workspace."""

    flops: Callable[[OpCall], int] | None = None  # instead of the flop counter's formula
    flops_like: str = ""  # the aten op whose formula is used, for ops that the counter lacks
    extra_passes: float = 0.0  # over its largest input, on top of reading it once
    gathers: bool = False  # reads of its first input as much as it writes: rows picked by an index
    no_device_work: bool = False  # allocates and writes nothing
    workspace: Callable[[OpCall], int] | None = None  # bytes; None: no workspace


def _copied_operands(call: OpCall) -> int:
    # A product reads operands whose rows or columns are contiguous; others are copied first.
    return sum(s.numel * s.itemsize for s in call.inputs[-2:] if not _is_matrix_like(s))


def _attention_backward(call: OpCall) -> int:
    # Gradients of the queries are summed in float32, beside one row sum per query.
    if len(call.inputs) < 2:
        return 0
    query = call.inputs[1]
    rows = query.numel // max(1, query.shape[-1])
    return query.numel * 4 + rows * 4 if query.itemsize < 4 else rows * 4


def _sorted_indices(call: OpCall) -> int:
    # CUDA sorts the indices and keeps their order: four arrays of their size.
    if call.device != "cuda" or len(call.inputs) < 2:
        return 0
    return 4 * call.inputs[1].numel * call.inputs[1].itemsize


_FLASH = "_scaled_dot_product_flash_attention"
_EFFICIENT = "_scaled_dot_product_efficient_attention"

# By the op's name without its overload; "*" stands for any text, for families of ops. The exact
# name counts before a pattern, and an earlier pattern before a later one.
OP_COSTS: dict[str, OpCost] = {
    # Extra passes: statistics are computed in a first pass over the data.
    "aten._native_batch_norm_legit": OpCost(extra_passes=1.0),
    "aten._native_batch_norm_legit_functional": OpCost(extra_passes=1.0),
    "aten.native_batch_norm": OpCost(extra_passes=1.0),
    "aten.native_batch_norm_backward": OpCost(extra_passes=1.0),
    "aten.native_group_norm_backward": OpCost(extra_passes=1.0),
    "aten.native_layer_norm_backward": OpCost(extra_passes=0.5),
    "rekindle.layer_norm_backward": OpCost(extra_passes=0.5),
    "aten.embedding": OpCost(gathers=True),
    "aten.gather": OpCost(gathers=True),
    "aten.index": OpCost(gathers=True),
    "aten.index_select": OpCost(gathers=True),
    "aten.take": OpCost(gathers=True),
    "aten.empty": OpCost(no_device_work=True),
    "aten.empty_like": OpCost(no_device_work=True),
    "aten.new_empty": OpCost(no_device_work=True),
    "aten.new_empty_strided": OpCost(no_device_work=True),
    "aten.mm": OpCost(workspace=_copied_operands),
    "aten.bmm": OpCost(workspace=_copied_operands),
    "aten.addmm": OpCost(workspace=_copied_operands),
    "aten.baddbmm": OpCost(workspace=_copied_operands),
    "aten.embedding_dense_backward": OpCost(workspace=_sorted_indices),
    "aten._scaled_dot_product_flash_attention_for_cpu": OpCost(flops_like=_FLASH),
    "aten._scaled_dot_product_flash_attention_for_cpu_backward": OpCost(
        flops_like=f"{_FLASH}_backward", workspace=_attention_backward
    ),
    "aten._scaled_dot_product_fused_attention_overrideable": OpCost(flops_like=_FLASH),
    "rekindle.packed_attention_backward": OpCost(
        flops_like=f"{_EFFICIENT}_backward", workspace=_attention_backward
    ),
    "*attention*backward": OpCost(workspace=_attention_backward),
}
_PLAIN = OpCost()


def op_cost(call: OpCall) -> OpCost:
    """The entry of `OP_COSTS` for a call, or the plain one."""
    packet = packet_of(call)
    known = OP_COSTS.get(packet)
    if known is not None:
        return known
    patterns = (name for name in OP_COSTS if "*" in name and fnmatchcase(packet, name))
    return OP_COSTS.get(next(patterns, ""), _PLAIN)


def estimate(call: OpCall, device: DeviceDescription, note: str = "") -> OpProfile:
    """The numbers of one op on the described device."""
    blocks = _blocks(device)
    outputs = output_blocks(call, blocks)
    if call.is_view or _getitem(call):
        # Costs the host its call, and the device nothing.
        return OpProfile(0, 0, outputs, Source.ESTIMATED, 0, device.view_ns, note)
    device_ns = _device_ns(call, device)
    known = op_cost(call)
    return OpProfile(
        cost_ns=max(device_ns, device.launch_ns),
        workspace_bytes=blocks.block_bytes(known.workspace(call) if known.workspace else 0),
        output_bytes=outputs,
        source=Source.ESTIMATED,
        device_ns=device_ns,
        host_ns=device.host_ns,
        note=note,
    )


def output_blocks(call: OpCall, blocks: Blocks) -> tuple[int, ...]:
    """Per output: the block of its own storage; 0 for a view or a storage listed before."""
    seen: set[int] = set()
    sizes = []
    for out in call.outputs:
        new = out is not None and call.is_new(out) and out.alias not in seen
        if new and out is not None:
            seen.add(out.alias)
        sizes.append(blocks.block_bytes(out.storage_bytes) if new and out is not None else 0)
    return tuple(sizes)


def flops(call: OpCall) -> int | None:
    """Floating-point operations: by the op's own formula, else the counter's, else None."""
    known = op_cost(call)
    if known.flops is not None:
        return known.flops(call)
    formula = _formula(call)
    if formula is None:
        return None
    args, kwargs = map_specs(call.args, _meta), map_specs(call.kwargs, _meta)
    outputs = tuple(None if out is None else _meta(out) for out in call.outputs)
    try:
        return int(formula(*args, **kwargs, out_val=outputs[0] if len(outputs) == 1 else outputs))
    except (TypeError, ValueError, AssertionError, IndexError, RuntimeError):
        return None  # a formula that does not take this overload's arguments


def moved_bytes(call: OpCall) -> int:
    """Bytes read and written, each distinct one once."""
    known = op_cost(call)
    written = sum(o.touched_bytes for o in call.outputs if o is not None and call.is_new(o))
    read: dict[int, int] = {}
    for spec in call.inputs:
        # Two views of one storage are read once, through a cache: the larger one counts.
        read[spec.alias] = max(read.get(spec.alias, 0), spec.touched_bytes)
    if known.gathers and call.inputs:
        first = call.inputs[0].alias
        read[first] = min(read[first], written)
    inplace = not written
    if inplace and call.inputs:  # it writes its first argument
        written = call.inputs[0].touched_bytes
    total = sum(read.values()) + written
    return total + int(known.extra_passes * max(read.values(), default=0))


def _device_ns(call: OpCall, device: DeviceDescription) -> int:
    if op_cost(call).no_device_work:
        return 0
    # Bytes over bytes per second, FLOPs over FLOPs per second; what is slower is the op's time.
    memory_s = moved_bytes(call) / (device.bandwidth * device.share("memory"))
    count = flops(call)
    work_s = 0.0
    if count:
        kind = _kind(call)
        work_s = count / (device.rate(_rate_key(call, kind, device)) * device.share(kind))
    return max(1, math.ceil(1e9 * max(memory_s, work_s)))


def _kind(call: OpCall) -> str:
    packet = packet_of(call)
    if "conv" in packet:
        return "convolution"
    return "attention" if "attention" in packet else "matmul"


def _rate_key(call: OpCall, kind: str, device: DeviceDescription) -> str:
    dtype = next((s.dtype for s in call.inputs if s.torch_dtype.is_floating_point), "float32")
    if dtype != "float32" or device.kind != "cuda":
        return dtype
    if kind == "convolution":
        return "tf32" if torch.backends.cudnn.allow_tf32 else "float32"
    if kind == "matmul" and torch.get_float32_matmul_precision() != "highest":
        return "tf32"
    return "float32"


def _is_matrix_like(spec: TensorSpec) -> bool:
    rows, columns = spec.stride[-2:]
    return (columns == 1 or spec.shape[-1] == 1) or (rows == 1 or spec.shape[-2] == 1)


def _formula(call: OpCall) -> Any:
    registry = flop_counter.flop_registry
    same = op_cost(call).flops_like
    if same:
        packet = getattr(torch.ops.aten, same)
    else:
        packet = getattr(call.target, "overloadpacket", call.target)
    try:
        return registry.get(packet)
    except TypeError:  # an unhashable target
        return None


def _getitem(call: OpCall) -> bool:
    return call.name == "_operator.getitem"


def _meta(spec: TensorSpec) -> torch.Tensor:
    return torch.empty(spec.shape, dtype=spec.torch_dtype, device="meta")


def _blocks(device: DeviceDescription) -> Blocks:
    if device.kind == "cuda":
        return CudaBlocks(round_bytes=device.block_bytes)
    return CpuBlocks(round_bytes=device.block_bytes)
