"""What the allocator really takes for a request of n bytes: the block it hands out.

On the CPU a block is the request. The CUDA caching allocator rounds a request up to 512 bytes and
then looks for a block (facts of c10/cuda/CUDACachingAllocator.cpp, torch 2.11 to 2.13; 2.15 has the
same sizes):

- up to 1 MiB: the small pool; a block is always split down to the rounded request;
- above 1 MiB: the smallest cached block that is large enough, else a new segment: 20 MiB for
  requests below 10 MiB, from there on a multiple of 2 MiB. A block is split only if more than
  1 MiB would be left, so it may be up to 1 MiB larger than the request;
- with `expandable_segments:True` every block is split down to the rounded request.

`memory_allocated` counts blocks, not requests. `block_bytes` is the block that a request gets from
a new segment; `CudaBlocks.expandable` says that blocks are exact.
"""

import os
import re
from dataclasses import dataclass

MIB = 2**20
ROUND = 512
SMALL = 1 * MIB  # requests up to here come from the small pool
LARGE = 10 * MIB  # requests from here on get a segment of their own
SEGMENT = 2 * MIB  # whose size is a multiple of this
LARGE_SEGMENT = 20 * MIB  # what requests between the two share


@dataclass(frozen=True, slots=True)
class CpuBlocks:
    """The CPU allocator: a block is what was asked for."""

    round_bytes: int = 1

    def block_bytes(self, request_bytes: int) -> int:
        return _round_up(request_bytes, self.round_bytes)


@dataclass(frozen=True, slots=True)
class CudaBlocks:
    """The CUDA caching allocator."""

    expandable: bool = False
    round_bytes: int = ROUND

    def block_bytes(self, request_bytes: int) -> int:
        rounded = _round_up(request_bytes, self.round_bytes)
        if self.expandable or rounded < LARGE:
            return rounded
        segment = _round_up(rounded, SEGMENT)
        return segment if segment - rounded <= SMALL else rounded


Blocks = CpuBlocks | CudaBlocks


def blocks_of(kind: str) -> Blocks:
    """The allocator of a device kind as this process is set up to use it."""
    return CudaBlocks(expandable=expandable_segments()) if kind == "cuda" else CpuBlocks()


def expandable_segments() -> bool:
    """Whether segments grow, as PYTORCH_ALLOC_CONF asks for."""
    return allocator_settings().get("expandable_segments", "").lower() == "true"


def allocator_settings() -> dict[str, str]:
    """What PYTORCH_ALLOC_CONF (PYTORCH_CUDA_ALLOC_CONF before torch 2.10) says, by name."""
    found: dict[str, str] = {}
    for variable in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        # Commas stand between settings, and inside a list of them.
        text = re.sub(r"\[[^]]*\]", lambda m: m[0].replace(",", ";"), os.environ.get(variable, ""))
        for setting in text.split(","):
            key, _, value = setting.partition(":")
            if key.strip():
                found[key.strip()] = value.strip()
    return found


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
