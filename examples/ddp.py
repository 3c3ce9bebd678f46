"""Data-parallel training with a managed model: DistributedDataParallel goes around it as around any
other module, and overlaps its gradients with the backward as ever.

    torchrun --nproc-per-node 2 examples/ddp.py

Uses one GPU per process and NCCL where there are enough, else the CPU and gloo.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import rekindle


def build(width: int, layers: int) -> nn.Module:
    blocks = (
        nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU())
        if k % 2 == 0
        else nn.Linear(4 * width, width)
        for k in range(2 * layers)
    )
    return nn.Sequential(*blocks)


def main() -> None:
    options = parse()
    rank, local = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    on_gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", local) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    torch.manual_seed(0)  # the same weights everywhere
    model = build(options.width, options.layers).to(device)
    torch.manual_seed(1 + rank)  # other data on each rank
    x = torch.randn(options.batch, options.width, device=device)

    managed = plan_once(model, x, options)
    parallel = DistributedDataParallel(managed, device_ids=[local] if on_gpu else None)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    for _ in range(options.steps):
        loss = (parallel(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    weights = sum(p.detach().double().sum() for p in model.parameters())
    everywhere = [torch.zeros_like(weights) for _ in range(dist.get_world_size())]
    dist.all_gather(everywhere, weights)
    assert all(torch.equal(weights, other) for other in everywhere), "the ranks drifted apart"
    if rank == 0:
        eager = rekindle.measure(model, (x,), num_steps=1).peak_bytes
        peak = rekindle.measure(managed, (x,), num_steps=1).peak_bytes
        print(
            f"loss {loss.item():.4f} on rank 0 of {len(everywhere)}; measured peak "
            f"{peak / 2**20:.1f} MiB of eager's {eager / 2**20:.1f} MiB ({peak / eager:.0%}); "
            "all ranks hold the same weights"
        )
    dist.barrier()  # none leaves while another still works
    dist.destroy_process_group()


def plan_once(model: nn.Module, x: torch.Tensor, options: argparse.Namespace) -> nn.Module:
    """Rank 0 plans; all ranks run the plan it found."""
    shared = [None]
    if dist.get_rank() == 0:
        plan = rekindle.plan(model, (x,), budget=options.budget, time_limit_s=options.time_limit)
        shared = [plan.schedule]
    dist.broadcast_object_list(shared)
    return rekindle.rematerialize(model, (x,), schedule=shared[0], profile="estimate")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--budget", default="0.7", help="bytes, 4GiB, or a fraction such as 0.5")
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--time-limit", type=float, default=10.0, help="seconds for the solver")
    return parser.parse_args()


if __name__ == "__main__":
    main()
