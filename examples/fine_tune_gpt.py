"""Fine-tunes a GPT-2 on the text of a file, inside half of the memory that it would take.

    python examples/fine_tune_gpt.py                       # a small GPT-2 with random weights
    python examples/fine_tune_gpt.py --model gpt2          # a trained one, by name or folder
    python examples/fine_tune_gpt.py --budget 4GiB --batch 16 --length 1024

Needs `pip install transformers`. Uses the GPU where there is one.
"""

import argparse
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import rekindle


def main() -> None:
    options = parse()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = load(options.model).to(device).train()
    model.config.use_cache = False
    ids = tokens(options.text, options.batch, options.length, device)

    # The one line. `model(...).loss.backward()` drops the logits before the backward runs, and a
    # plan that knows it may free them.
    managed = rekindle.rematerialize(
        model,
        kwargs={"input_ids": ids[0], "labels": ids[0]},
        budget=options.budget,
        hold_outputs=False,
        time_limit_s=options.time_limit,
    )

    optimizer = torch.optim.AdamW(managed.parameters(), lr=1e-3)
    for step in range(options.steps):
        batch = ids[step % len(ids)]
        loss = managed(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.4f}")

    plan = managed.plan
    step = {"input_ids": ids[0], "labels": ids[0]}
    eager = rekindle.measure(model, kwargs=step, num_steps=1).peak_bytes
    peak = rekindle.measure(managed, kwargs=step, num_steps=1).peak_bytes
    print(
        f"loss {loss.item():.4f}; measured peak {peak / 2**20:.1f} MiB of eager's "
        f"{eager / 2**20:.1f} MiB ({peak / eager:.0%}), planned {100 * plan.overhead:+.1f} % time"
    )


def load(name: str | None) -> GPT2LMHeadModel:
    if name is not None:
        return GPT2LMHeadModel.from_pretrained(name)
    config = GPT2Config(vocab_size=256, n_positions=1024, n_embd=128, n_layer=4, n_head=4)
    return GPT2LMHeadModel(config)


def tokens(path: Path, batch: int, length: int, device: torch.device) -> torch.Tensor:
    """Bytes as tokens, in batches: (number of batches, batch, length)."""
    data = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8).long()
    data = data.repeat(1 + batch * length // len(data))
    return data[: len(data) // (batch * length) * batch * length].view(-1, batch, length).to(device)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", help="a name or folder for from_pretrained")
    parser.add_argument("--text", type=Path, default=Path(__file__), help="what to train on")
    parser.add_argument("--budget", default="0.5", help="bytes, 4GiB, or a fraction such as 0.5")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--time-limit", type=float, default=20.0, help="seconds for the solver")
    return parser.parse_args()


if __name__ == "__main__":
    main()
