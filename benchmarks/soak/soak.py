"""500 steps as a long training has them, with everything that goes wrong in one: what is left over.

    python benchmarks/soak/soak.py [--steps 500] [--device cuda] [-o FILE]

The claim: live tensors, pinned memory and the process's own memory (RSS) do not grow beyond those
of the same training in eager mode. The steps have changing shapes, more of them than there is room
for plans, so plans are dropped and made again; every fifth is an evaluation without gradients, some
end with an error in the forward or in the backward, some have gradients other than those planned,
some are never taken backward; now and then the state is saved and loaded, the plan is written to a
file, read and applied to the same model, and the managed module is copied. All losses are kept in a
list, with their `grad_fn`.

Eager and managed run in a process each. What is compared is the growth from step 200 on, by when
caches are full. Fails where the managed run has grown more: by one tensor, one pinned byte, one
byte on the GPU, or by more of RSS than `RSS_SLACK` (the allocator of the C library gives freed
memory back in no order).
"""

import argparse
import ctypes
import gc
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

HERE = Path(__file__).resolve().parent
SETTLED, EVERY = 200, 50  # steps
RSS_SLACK = 24 * 2**20
LENGTHS = (8, 12, 16, 20, 24, 28)
MAX_PLANS = 3


class Net(nn.Module):
    """Attention, dropout, running statistics and a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(32, 2, 64, dropout=0.1, batch_first=True) for _ in range(3)
        )
        self.norm = nn.BatchNorm1d(32)
        self.head = nn.Linear(32, 64)
        self.fails = False

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        if self.fails:
            raise ValueError("a batch that the model refuses")
        pooled = self.norm(x.mean(1))
        return self.head(x), pooled


class BrokenBackward(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise ValueError("an error in the backward")


class Training:
    def __init__(self, managed: bool, device: str, folder: Path) -> None:
        torch.manual_seed(0)
        self.managed, self.device, self.folder = managed, device, folder
        self.plain = Net().to(device).train()
        self.model: nn.Module = self.plain
        self.losses: list[torch.Tensor] = []
        if managed:
            import rekindle

            self.model = rekindle.rematerialize(
                self.plain, inplace=True, budget=0.7, time_limit_s=0.2, on_miss="replan",
                max_plans=MAX_PLANS,
            )  # fmt: skip
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def step(self, number: int) -> None:
        ids = torch.randint(0, 64, (4, LENGTHS[number // 7 % len(LENGTHS)]), device=self.device)
        if number % 5 == 0:
            self.evaluate(ids)
        match number % 20:
            case 3:
                self.expecting_error(lambda: self.fail_in_forward(ids))
            case 8:
                self.expecting_error(lambda: BrokenBackward.apply(self.loss(ids)).backward())
            case 12:
                self.losses.append(self.loss(ids).detach())  # its graph is never taken backward
            case 16:  # gradients for one output alone
                self.model(ids)[1].square().sum().backward()
        loss = self.loss(ids)
        loss.backward()
        self.losses.append(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if number % 40 == 39:
            self.save_and_load(ids)

    def loss(self, ids: torch.Tensor) -> torch.Tensor:
        logits, pooled = self.model(ids)
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten()) + pooled.var()

    def evaluate(self, ids: torch.Tensor) -> None:
        self.model.eval()
        with torch.no_grad():
            self.losses.append(self.loss(ids))
        self.model.train()

    def fail_in_forward(self, ids: torch.Tensor) -> None:
        self.model.fails = True
        try:
            self.loss(ids).backward()
        finally:
            self.model.fails = False

    def expecting_error(self, run: Callable[[], Any]) -> None:
        try:
            run()
        except ValueError:
            self.optimizer.zero_grad()
            return
        raise AssertionError("no error arrived")

    def save_and_load(self, ids: torch.Tensor) -> None:
        at = self.folder / "state.pt"
        torch.save(self.model.state_dict(), at)
        self.model.load_state_dict(torch.load(at))
        if self.managed:
            import copy

            import rekindle

            path = self.folder / "plan.json"
            plan = rekindle.plan(self.plain, (ids,), budget=0.8, time_limit_s=0.2)
            plan.save(path)
            with torch.random.fork_rng():  # eager has no copies that draw
                other = rekindle.Plan.load(path).apply(copy.deepcopy(self.plain), (ids,))
                logits, _ = other(ids)
                logits.sum().backward()
                copy.deepcopy(self.model)(ids)[0].sum().backward()


# ---- what is there


def account(device: str) -> dict[str, int]:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what is free goes back to the system
    # By its type: `isinstance` asks each object for its class, and some warn when they are asked.
    # A fake tensor has no data; what plans hold of them is counted as objects.
    kinds = (torch.Tensor, FakeTensor)
    tensors = [
        o for o in gc.get_objects() if [issubclass(type(o), k) for k in kinds] == [True, False]
    ]
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    with open("/proc/self/statm", encoding="ascii") as file:
        rss = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    found = {
        "tensors": len(tensors),
        "tensor_bytes": sum(storages.values()),
        "objects": len(gc.get_objects()),
        "rss_bytes": rss,
        "pinned_bytes": 0,
        "device_bytes": 0,
    }
    if device == "cuda":
        stats = torch.cuda.host_memory_stats()
        found["pinned_bytes"] = stats["allocated_bytes.current"]
        found["device_bytes"] = torch.cuda.memory_allocated()
    return found


def run(managed: bool, device: str, num_steps: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["REKINDLE_CACHE_DIR"] = folder
        training = Training(managed, device, Path(folder))
        series = []
        for number in range(num_steps):
            training.step(number)
            if (number + 1) % EVERY == 0:
                series.append({"steps": number + 1} | account(device))
        return {
            "managed": managed,
            "last_loss": training.losses[-1].item(),
            "growth": growth(series),
            "series": series,
        }


def growth(series: list[dict[str, int]]) -> dict[str, int]:
    """From the first account after SETTLED steps to the last."""
    settled = next((a for a in series if a["steps"] >= SETTLED), series[0])
    return {key: series[-1][key] - settled[key] for key in settled if key != "steps"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--only", choices=("eager", "managed"), help="in this process")
    parser.add_argument("-o", "--output", type=Path, default=HERE / "soak.json")
    args = parser.parse_args()
    if args.only:
        print(json.dumps(run(args.only == "managed", args.device, args.steps)))
        return 0
    found = {}
    for kind in ("eager", "managed"):
        command = [sys.executable, __file__, "--only", kind]
        command += ["--device", args.device, "--steps", str(args.steps)]
        said = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
        found[kind] = json.loads(said.splitlines()[-1])
    args.output.write_text(json.dumps({"torch": torch.__version__} | found, indent=1) + "\n")
    eager, ours = found["eager"]["growth"], found["managed"]["growth"]
    allowed = {"rss_bytes": RSS_SLACK}
    failed = []
    print(f"growth from step {SETTLED} to {args.steps}:  eager   managed")
    for key in ("tensors", "tensor_bytes", "pinned_bytes", "device_bytes", "rss_bytes", "objects"):
        print(f"  {key:16} {eager[key]:12,} {ours[key]:12,}")
        if key != "objects" and ours[key] > eager[key] + allowed.get(key, 0):
            failed.append(key)
    if found["eager"]["last_loss"] != found["managed"]["last_loss"]:
        failed.append("the last loss, which is not eager's")
    if failed:
        print(f"grown beyond eager: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
