"""Costs without the device: bytes moved and FLOPs over a device description (a roofline).

time = max(FLOPs / (rate x share), bytes / (bandwidth x share)), and at least one launch. FLOPs
come from `torch.utils.flop_counter` where it has a formula (matrix products, convolutions,
attention and their backwards); all other ops are counted by the bytes they touch. A view costs the
device nothing.

Known limits: an estimate does not know which kernel a library picks, nor its scratch memory; the
few ops whose temporaries follow from their definition are in `_workspace`.
"""

import math
from typing import Any

import torch
from torch.utils import flop_counter

from rekindle.plans.plan_record import Source
from rekindle.profile.base import OpProfile
from rekindle.profile.block_sizes import Blocks, CpuBlocks, CudaBlocks
from rekindle.profile.device import DeviceDescription
from rekindle.profile.op_signature import OpCall, TensorSpec, map_specs, packet_of

# Reads as much of its first input as it writes, not all of it: rows picked by an index.
_GATHERS = {"aten.embedding", "aten.gather", "aten.index", "aten.index_select", "aten.take"}
# The formula of an op that the counter does not list, under the name of one that it does.
_SAME_FLOPS = {
    "aten._scaled_dot_product_flash_attention_for_cpu": "_scaled_dot_product_flash_attention",
    "aten._scaled_dot_product_flash_attention_for_cpu_backward": (
        "_scaled_dot_product_flash_attention_backward"
    ),
    "aten._scaled_dot_product_fused_attention_overrideable": "_scaled_dot_product_flash_attention",
    "rekindle.packed_attention_backward": "_scaled_dot_product_efficient_attention_backward",
}
# Passes over the data beyond reading inputs and writing outputs once.
_EXTRA_PASSES = {
    "aten._native_batch_norm_legit": 1.0,
    "aten._native_batch_norm_legit_functional": 1.0,
    "aten.native_batch_norm": 1.0,
    "aten.native_batch_norm_backward": 1.0,
    "aten.native_group_norm_backward": 1.0,
    "aten.native_layer_norm_backward": 0.5,
    "rekindle.layer_norm_backward": 0.5,
}
_NO_DEVICE_WORK = {"aten.empty", "aten.empty_like", "aten.new_empty", "aten.new_empty_strided"}


def estimate(call: OpCall, device: DeviceDescription, note: str = "") -> OpProfile:
    """The numbers of one op on the described device."""
    blocks = _blocks(device)
    outputs = output_blocks(call, blocks)
    if call.is_view or _getitem(call):
        # Costs the host its call, and the device nothing.
        return OpProfile(0, 0, outputs, Source.ESTIMATED, 0, device.view_ns, note)
    device_ns = _device_ns(call, device)
    return OpProfile(
        cost_ns=max(device_ns, device.launch_ns),
        workspace_bytes=blocks.block_bytes(_workspace(call)),
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
    """Floating-point operations by the counter's formula, or None where it has none."""
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
    packet = packet_of(call)
    written = sum(o.touched_bytes for o in call.outputs if o is not None and call.is_new(o))
    read: dict[int, int] = {}
    for spec in call.inputs:
        # Two views of one storage are read once, through a cache: the larger one counts.
        read[spec.alias] = max(read.get(spec.alias, 0), spec.touched_bytes)
    if packet in _GATHERS and call.inputs:
        first = call.inputs[0].alias
        read[first] = min(read[first], written)
    inplace = not written
    if inplace and call.inputs:  # it writes its first argument
        written = call.inputs[0].touched_bytes
    total = sum(read.values()) + written
    return total + int(_EXTRA_PASSES.get(packet, 0.0) * max(read.values(), default=0))


def _device_ns(call: OpCall, device: DeviceDescription) -> int:
    if packet_of(call) in _NO_DEVICE_WORK:
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


def _workspace(call: OpCall) -> int:
    """Temporaries that follow from the op's definition, in bytes."""
    packet = packet_of(call)
    specs = call.inputs
    if packet in ("aten.mm", "aten.bmm", "aten.addmm", "aten.baddbmm"):
        # A product reads operands whose rows or columns are contiguous; others are copied first.
        operands = specs[-2:]
        return sum(s.numel * s.itemsize for s in operands if not _is_matrix_like(s))
    if "attention" in packet and packet.endswith("backward") and len(specs) > 1:
        # Gradients of the queries are summed in float32, beside one row sum per query.
        query = specs[1]
        rows = query.numel // max(1, query.shape[-1])
        return query.numel * 4 + rows * 4 if query.itemsize < 4 else rows * 4
    if packet == "aten.embedding_dense_backward" and call.device == "cuda" and len(specs) > 1:
        return 4 * specs[1].numel * specs[1].itemsize  # indices and their order, sorted
    return 0


def _is_matrix_like(spec: TensorSpec) -> bool:
    rows, columns = spec.stride[-2:]
    return (columns == 1 or spec.shape[-1] == 1) or (rows == 1 or spec.shape[-2] == 1)


def _formula(call: OpCall) -> Any:
    registry = flop_counter.flop_registry
    same = _SAME_FLOPS.get(packet_of(call))
    if same is not None:
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
