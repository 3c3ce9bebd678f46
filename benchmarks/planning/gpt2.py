"""The ops of GPT-2, narrow: what planning and checking a call costs hangs on how many there are."""

import sys
from pathlib import Path

import torch


def gpt2(num_layers: int) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """The model and the keyword arguments of one call."""
    sys.path.append(str(Path(__file__).parents[2] / "tests"))
    import transformers
    from support import torchvision_on_cpu

    if "torchvision" not in sys.modules:
        torchvision_on_cpu.install()
    transformers.logging.set_verbosity_error()
    config = transformers.GPT2Config(
        n_layer=num_layers, n_embd=64, n_head=4, vocab_size=512, n_positions=64, use_cache=False
    )
    torch.manual_seed(0)
    ids = torch.randint(0, 512, (2, 32))
    return transformers.GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids}
