"""Golden plans on a GPU, where the rewrites of the recorded graph fire: fused chains, layer norms,
packed attention, masked softmax, turned copies, ops taken apart.

    python tests/golden/gpu.py --out before.json        # records: the full texts, some MB
    python tests/golden/gpu.py --compare before.json    # exit code 1 where anything differs
    python tests/golden/gpu.py --device cpu --out x.json  # small sizes: only that it runs

Per model: the graph with its arguments, the problem, the schedule (of a search with a fixed number
of moves), the emitted code, the plan file and the reports; and the sources of all CUDA kernels that
were compiled for planning and one step. Costs are estimated for a described device, so that nothing
depends on a clock. The recording is for one kind of device and one release of torch, and is made
again from the older commit rather than kept.
"""

import argparse
import contextlib
import difflib
import hashlib
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

if __name__ == "__main__":
    _tests = Path(__file__).resolve().parent.parent
    sys.path[:0] = [str(_tests), str(_tests.parent / "src")]
    from support import torchvision_on_cpu

    torchvision_on_cpu.install()

from golden.capturing import facts_of_plan
from golden.models import Sample
from rekindle import BudgetInfeasible, plan
from rekindle.core import keep_all
from rekindle.solve.anneal.fastsa import FastSA

SEARCH = FastSA(num_moves=20_000, num_seeds=1)
BUDGET = 0.7
DESCRIPTION = "h200"
MOST_LINES = 40  # of a difference

Factory = Callable[[torch.device, bool], Sample]


class Mixer(nn.Module):
    """Mixes along patches and along channels, by turning the tensor around."""

    def __init__(self, patches: int, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(4))
        self.patches = nn.ModuleList(_mlp(patches) for _ in range(2))
        self.channels = nn.ModuleList(_mlp(width) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i in range(2):
            y = self.norms[2 * i](x).transpose(1, 2)
            x = x + self.patches[i](y).transpose(1, 2)
            x = x + self.channels[i](self.norms[2 * i + 1](x))
        return x


def _mlp(width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))


class Masked(nn.Module):
    """Attention with a mask and a learned bias, which no single kernel does."""

    def __init__(self, width: int, heads: int, length: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.bias = nn.Parameter(torch.zeros(heads, length, length))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = parts.unbind(0)
        bias = self.bias.masked_fill(mask, float("-inf"))
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        return x + self.out(y.transpose(1, 2).reshape(batch, length, width))


def encoder(device: torch.device, small: bool) -> Sample:
    width, length = (32, 16) if small else (512, 256)
    layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.1, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return model.to(device), (torch.randn(8, length, width, device=device),), {}


def encoder_pre_norm(device: torch.device, small: bool) -> Sample:
    width, length = (32, 16) if small else (512, 256)
    layer = nn.TransformerEncoderLayer(
        width, 4, 4 * width, dropout=0.1, batch_first=True, norm_first=True, activation="gelu"
    )
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return model.to(device), (torch.randn(8, length, width, device=device),), {}


def _gpt2(device: torch.device, small: bool, attention: str) -> Sample:
    from transformers import GPT2Config, GPT2LMHeadModel

    width, length = (32, 16) if small else (512, 256)
    config = GPT2Config(
        vocab_size=1024, n_positions=length, n_embd=width, n_layer=2, n_head=4, use_cache=False,
        bos_token_id=0, eos_token_id=0, attn_implementation=attention,
    )  # fmt: skip
    tokens = torch.randint(0, 1024, (8, length), device=device)
    model = GPT2LMHeadModel(config).to(device).train()
    return model, (), {"input_ids": tokens, "labels": tokens}


def gpt2_eager(device: torch.device, small: bool) -> Sample:
    return _gpt2(device, small, "eager")


def gpt2_sdpa(device: torch.device, small: bool) -> Sample:
    return _gpt2(device, small, "sdpa")


def t5(device: torch.device, small: bool) -> Sample:
    from transformers import T5Config, T5ForConditionalGeneration

    width, length = (32, 16) if small else (512, 256)
    config = T5Config(
        vocab_size=1024, d_model=width, d_kv=width // 4, d_ff=4 * width, num_layers=1, num_heads=4,
        use_cache=False, decoder_start_token_id=0, pad_token_id=0,
    )  # fmt: skip
    tokens = torch.randint(1, 1024, (8, length), device=device)
    mask = torch.ones_like(tokens)
    mask[:, length // 2 :] = 0
    model = T5ForConditionalGeneration(config).to(device).train()
    return model, (), {"input_ids": tokens, "attention_mask": mask, "labels": tokens}


def llama(device: torch.device, small: bool) -> Sample:
    from transformers import LlamaConfig, LlamaForCausalLM

    width, length = (32, 16) if small else (512, 512)
    config = LlamaConfig(
        vocab_size=1024, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=length,
        use_cache=False, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    tokens = torch.randint(0, 1024, (4, length), device=device)
    model = LlamaForCausalLM(config).to(device, torch.bfloat16).train()
    return model, (), {"input_ids": tokens, "labels": tokens}


def resnet(device: torch.device, small: bool) -> Sample:
    import torchvision

    side = 32 if small else 128
    model = torchvision.models.resnet18(num_classes=10).to(device).train()
    return model, (torch.randn(8, 3, side, side, device=device),), {}


def resnet_channels_last(device: torch.device, small: bool) -> Sample:
    model, (x,), _ = resnet(device, small)
    last = torch.channels_last
    return model.to(memory_format=last), (x.to(memory_format=last),), {}


def vit(device: torch.device, small: bool) -> Sample:
    import timm

    side = 32 if small else 224
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=side, depth=2, num_classes=10, pretrained=False
    )
    return model.to(device).train(), (torch.randn(16, 3, side, side, device=device),), {}


def mixer(device: torch.device, small: bool) -> Sample:
    patches, width = (16, 32) if small else (192, 512)
    return Mixer(patches, width).to(device), (torch.randn(8, patches, width, device=device),), {}


def masked(device: torch.device, small: bool) -> Sample:
    width, length = (32, 16) if small else (256, 256)
    mask = torch.ones(length, length, dtype=torch.bool, device=device).triu(1)
    mask[3] = True  # a row without anything to look at
    x = torch.randn(8, length, width, device=device)
    return Masked(width, 4, length).to(device), (x, mask), {}


# What is planned, and whether inside autocast to bfloat16.
CASES: tuple[tuple[Factory, bool], ...] = (
    (encoder, False), (encoder, True), (encoder_pre_norm, False), (encoder_pre_norm, True),
    (gpt2_eager, False), (gpt2_sdpa, False), (gpt2_sdpa, True), (t5, False), (masked, False),
    (masked, True), (resnet, False), (resnet_channels_last, True), (mixer, False), (mixer, True),
    (vit, False), (vit, True), (llama, False),
)  # fmt: skip


def facts(factory: Factory, autocast: bool, device: torch.device) -> dict[str, Any]:
    """The plan of one case, after a step by it, which compiles what only a step needs."""
    torch.manual_seed(0)
    model, args, kwargs = factory(device, device.type == "cpu")
    how: dict[str, Any] = {"profile": "estimate", "device_profile": DESCRIPTION, "cache": False}
    with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
        try:
            found = plan(model, args, kwargs, budget=BUDGET, solver=SEARCH, time_limit_s=1e6, **how)
        except BudgetInfeasible:
            found = plan(model, args, kwargs, schedule=keep_all, **how)
        record = facts_of_plan(found)
        managed = found.apply(model, args, kwargs, on_miss="raise")
        out = managed(*args, **kwargs)
    loss = out if isinstance(out, torch.Tensor) else out.loss
    loss.float().square().mean().backward()
    return record


@contextlib.contextmanager
def kernels_noted() -> Iterator[dict[str, str]]:
    """The sources of the kernels that are compiled meanwhile, by name."""
    noted: dict[str, str] = {}
    compile_kernel = torch.cuda._compile_kernel

    def note(source: str, name: str, *args: Any, **kwargs: Any) -> Any:
        text = f"{source}\n// {args} {sorted(kwargs)}"
        # Kernels of several dtypes may share a name.
        noted[f"{name} {hashlib.sha256(text.encode()).hexdigest()[:8]}"] = text
        return compile_kernel(source, name, *args, **kwargs)

    torch.cuda._compile_kernel = note
    try:
        yield noted
    finally:
        torch.cuda._compile_kernel = compile_kernel


def recorded(device: torch.device) -> dict[str, dict[str, Any]]:
    """All cases, and the kernels."""
    items: dict[str, dict[str, Any]] = {}
    with kernels_noted() as kernels:
        for factory, autocast in CASES:
            name = factory.__name__ + (" autocast" if autocast else "")
            begun = time.monotonic()
            items[name] = facts(factory, autocast, device)
            num_own = sum("rekindle" in line or "fused_" in line for line in _graph(items[name]))
            print(f"{name}: {num_own} own ops, {len(kernels)} kernels so far, "
                  f"{time.monotonic() - begun:.1f} s", flush=True)  # fmt: skip
    items["kernels"] = dict(sorted(kernels.items()))
    return items


def _graph(item: dict[str, Any]) -> list[str]:
    return str(item["graph"]).splitlines()


def differences(old: dict[str, Any], new: dict[str, Any]) -> Iterator[str]:
    """What differs, and how: the first lines of each difference."""
    for key in dict.fromkeys((*old, *new)):
        before, after = old.get(key, {}), new.get(key, {})
        for field in dict.fromkeys((*before, *after)):
            a, b = before.get(field), after.get(field)
            if a == b:
                continue
            yield f"{key}: {field} differs"
            was, now = (x.splitlines() if isinstance(x, str) else [repr(x)] for x in (a, b))
            diff = difflib.unified_diff(was, now, "before", "now", lineterm="", n=1)
            yield from (line[:200] for _, line in zip(range(MOST_LINES), diff, strict=False))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, metavar="FILE")
    parser.add_argument("--compare", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    if arguments.out is None and arguments.compare is None:
        parser.error("give --out FILE or --compare FILE")
    device = torch.device(arguments.device)
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    # As JSON gives them back: tuples are lists there.
    items = json.loads(json.dumps(recorded(device)))
    made_with = {"device": where, "torch": torch.__version__}
    if arguments.out is not None:
        arguments.out.write_text(json.dumps({"made_with": made_with, "items": items}), "utf-8")
    if arguments.compare is None:
        return 0
    old = json.loads(arguments.compare.read_text("utf-8"))
    if old["made_with"] != made_with:
        print(f"recorded with {old['made_with']}, this is {made_with}: not comparable")
        return 1
    lines = list(differences(old["items"], items))
    print("\n".join(lines) if lines else f"{len(items)} items, all as recorded")
    return 1 if lines else 0


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.exit(main())
