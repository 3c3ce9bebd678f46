"""Random models: some dozens of instructions over a pool of tensors of one shape.

Views, in-place writes through views, random ops, batch norm, mutated buffers, multi-output ops,
other dtypes, detached and frozen parts, several outputs: whatever eager accepts. A model is
defined by its seed.
"""

import random
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

ROWS, WIDTH = 8, 16


class RandomModel(nn.Module):
    def __init__(self, seed: int, num_instructions: int = 24) -> None:
        super().__init__()
        source = random.Random(seed)
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.layer_norm = nn.LayerNorm(WIDTH)
        self.convolution = nn.Conv1d(1, 2, 3, padding=1)
        self.embedding = nn.Embedding(WIDTH, WIDTH)
        self.register_buffer("running", torch.ones(WIDTH))
        for linear in self.linears:
            linear.weight.requires_grad_(source.random() < 0.8)
        self.instructions: list[tuple[str, float, float, int]] = [
            (source.choice(NAMES), source.random(), source.random(), source.randrange(4))
            for _ in range(num_instructions)
        ]
        self.num_outputs = source.randint(1, 3)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        pool = [self.linears[0](x), self.linears[1](y) + x]
        for name, first, second, number in self.instructions:
            # The newest tensors are the likeliest, so that chains grow deep.
            a = pool[-1 - int(first * first * len(pool))]
            b = pool[-1 - int(second * second * len(pool))]
            out = INSTRUCTIONS[name](self, a, b, number)
            if out is not None:
                pool.append(out)
        return tuple(pool[-self.num_outputs :])


Instruction = Callable[[RandomModel, Tensor, Tensor, int], Tensor | None]
INSTRUCTIONS: dict[str, Instruction] = {}


def instruction(run: Instruction) -> Instruction:
    INSTRUCTIONS[run.__name__] = run
    return run


@instruction
def linear(model, a, b, n):
    return model.linears[n](a)


@instruction
def add(model, a, b, n):
    return a + b


@instruction
def multiply(model, a, b, n):
    return a * b.tanh()


@instruction
def unary(model, a, b, n):
    return (torch.sin, torch.tanh, F.gelu, torch.sigmoid)[n](a)


@instruction
def fresh_in_place(model, a, b, n):
    c = a + 0.1 * b
    return (c.relu_, c.sigmoid_, c.tanh_, lambda: F.silu(c, inplace=True))[n]()


@instruction
def scale_in_place(model, a, b, n):
    a.mul_(0.5 + n)


@instruction
def add_in_place(model, a, b, n):
    a.add_(b.detach() if n == 0 else b, alpha=0.5)


@instruction
def write_through_a_view(model, a, b, n):
    a.view(4, 2, WIDTH)[n].mul_(1.5)


@instruction
def assign_to_a_slice(model, a, b, n):
    c = a.clone()
    c[:, n : n + 4] = b[:, 4:8]
    return c


@instruction
def assign_to_zeros(model, a, b, n):
    c = torch.zeros_like(a)
    c[n:] = a[n:] * 2
    c[:, :2] += b[:, :2]
    return c


@instruction
def transposed(model, a, b, n):
    return a.view(4, 2, WIDTH).transpose(0, 1).reshape(ROWS, WIDTH)


@instruction
def plain_view(model, a, b, n):
    return a.view(2, 4, WIDTH).view(ROWS, WIDTH)


@instruction
def transposed_view(model, a, b, n):
    return a.t().reshape(WIDTH, ROWS).t()


@instruction
def joined(model, a, b, n):
    return torch.cat([a, b], dim=1)[:, n : n + WIDTH]


@instruction
def split_and_stacked(model, a, b, n):
    left, right = a.split(WIDTH // 2, dim=1)
    return torch.cat([right, left * b[:, :1]], dim=1)


@instruction
def unbound(model, a, b, n):
    rows = a.unbind(0)
    return torch.stack([rows[(i + n) % ROWS] for i in range(ROWS)])


@instruction
def dropped(model, a, b, n):
    return F.dropout(a, 0.1 * n)


@instruction
def dropped_in_place(model, a, b, n):
    return F.dropout(a + b, 0.3, inplace=True)


@instruction
def noise(model, a, b, n):
    return a + 0.1 * (torch.rand_like(a) if n % 2 else torch.randn(ROWS, 1, device=a.device))


@instruction
def bernoulli(model, a, b, n):
    return a * torch.empty_like(b).bernoulli_(0.5)


@instruction
def normalized(model, a, b, n):
    return model.norm(a)


@instruction
def layer_normalized(model, a, b, n):
    return model.layer_norm(a)


@instruction
def running_update(model, a, b, n):
    before = a + model.running
    model.running.mul_(0.9).add_(b.detach().mean(dim=0), alpha=0.1)
    return before * model.running.clone()


@instruction
def softmax(model, a, b, n):
    return (a @ b.t()).softmax(dim=-1) @ b


@instruction
def attention(model, a, b, n):
    q, k, v = (t.view(2, 4, 2, 8).transpose(1, 2) for t in (a, b, a))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=bool(n % 2))
    return out.transpose(1, 2).reshape(ROWS, WIDTH)


@instruction
def sorted_rows(model, a, b, n):
    values, indices = a.sort(dim=0)
    return values + b.gather(0, indices)


@instruction
def largest(model, a, b, n):
    values, indices = a.topk(4, dim=1)
    return b.scatter(1, indices, values)


@instruction
def maximum(model, a, b, n):
    return a - a.max(dim=1, keepdim=True).values + b.amax(dim=0)


@instruction
def selected(model, a, b, n):
    return torch.where(a > b, a, b.masked_fill(b < 0, 0.5))


@instruction
def embedded(model, a, b, n):
    return a + model.embedding(b.detach().argmax(dim=1))


@instruction
def convolved(model, a, b, n):
    return model.convolution(a.unsqueeze(1)).mean(dim=1) + b


@instruction
def spectrum(model, a, b, n):
    f = torch.fft.rfft(a)
    return torch.fft.irfft(f * torch.fft.rfft(b).conj(), n=WIDTH)


@instruction
def low_precision(model, a, b, n):
    return (a.bfloat16() * b.bfloat16()).float()


@instruction
def detached(model, a, b, n):
    return a.detach() * b


@instruction
def without_gradient(model, a, b, n):
    with torch.no_grad():
        factor = (a * b).mean(dim=0).sigmoid()
    return a * factor


@instruction
def saved_region(model, a, b, n):
    return checkpoint(lambda t: F.dropout(torch.tanh(t * 2), 0.2), a, use_reentrant=False)


@instruction
def summed(model, a, b, n):
    return a.cumsum(dim=n % 2) * 0.1 + b.sum(dim=1, keepdim=True).expand(-1, WIDTH) * 0.01


@instruction
def indexed(model, a, b, n):
    rows = torch.tensor([n, 1, 5, 2], device=a.device)
    return a.index_add(0, rows, b[:4])


@instruction
def multiplied_batches(model, a, b, n):
    return (
        torch.bmm(a.view(2, 4, WIDTH), b.view(2, 4, WIDTH).transpose(1, 2))
        .reshape(ROWS, 4)
        .repeat(1, 4)
    )


@instruction
def rolled_and_turned(model, a, b, n):
    return a.t().roll(n, 0).t() + b


@instruction
def turned_norm(model, a, b, n):
    turned = a.reshape(WIDTH, ROWS).t()
    return model.layer_norm(turned).t().reshape(ROWS, WIDTH) * b.sigmoid()


@instruction
def turned_activation(model, a, b, n):
    turned = a.t().clone().t() + b
    if n == 3:
        return F.log_softmax(turned, dim=0)
    return (F.hardswish, F.elu, F.softplus)[n](turned)


@instruction
def last_channels(model, a, b, n):
    image = a.view(1, 2, 8, ROWS).to(memory_format=torch.channels_last)
    pooled = F.avg_pool2d(F.pad(image, (1, 1, 1, 1), mode="reflect"), 3, stride=1)
    return F.hardswish(pooled).reshape(ROWS, WIDTH) + b


@instruction
def gated(model, a, b, n):
    return F.glu(torch.cat([a.t(), b.t()], dim=0), dim=0).t()


NAMES = tuple(INSTRUCTIONS)
