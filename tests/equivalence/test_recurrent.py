"""cuDNN's recurrent layers as two opaque ops. Without a GPU the kernels are played by others with
cuDNN's manners: a reserve of a size that only they know, which the backward overwrites; gradients
of the weights that are views of one block; a block of weights in an order of its own."""

import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support.compare import assert_same, train
from support.manage import assert_trains_alike, example_of, manage
from support.schedules import SCHEDULES
from support.zoo import Example, gaussian
from torch import Tensor, nn

from rekindle.capture import cudnn_rnn
from rekindle.errors import CaptureError
from rekindle.torch_compat import recurrent_layers_call

CPU = torch.device("cpu")
EVERY_SCHEDULE = pytest.mark.parametrize("schedule", SCHEDULES)
FUNCTIONS = {0: torch.rnn_relu, 1: torch.rnn_tanh, 2: torch.lstm, 3: torch.gru}
PADDING = 7  # numbers before the weights in a block


def play(source, weight, hx, cx, mode, layers, batch_first, train, both, bias):
    """The layer as torch computes it on a CPU, as (output, hy, cy)."""
    hidden = (hx, cx) if mode == 2 else hx
    out = FUNCTIONS[mode](source, hidden, list(weight), bias, layers, 0.0, train, both, batch_first)
    return (*out, None)[:3]


def forward(source, weight, stride, block, hx, cx, mode, size, projected, layers, batch_first,
            dropout, train, both, batch_sizes, state):  # fmt: skip
    assert (dropout, batch_sizes, state, projected) == (0.0, [], None, 0)
    if block is not None:
        check_block(block, weight)
    with torch.no_grad():
        out = play(source, weight, hx, cx, mode, layers, batch_first, train, both, stride == 4)
    output, hy, cy = out
    reserve = output.contiguous().view(torch.uint8).flatten()
    reserve = torch.cat([reserve, torch.ones(13, dtype=torch.uint8)])
    copied = torch.empty(sum(w.numel() for w in weight) + PADDING) if block is None else block
    return output, hy, torch.empty(0) if cy is None else cy, reserve, copied


def gradients(leaves, has_cx, settings, grads):
    source, hx, *rest = leaves = [t.detach().clone().requires_grad_() for t in leaves]
    cx = rest.pop(0) if has_cx else None
    made = play(source, rest, hx, cx, *settings)
    pairs = [(out, g) for out, g in zip(made, grads, strict=True) if g is not None]
    return torch.autograd.grad([p[0] for p in pairs], leaves, [p[1] for p in pairs])


def backward(source, weight, stride, block, hx, cx, output, grad_output, grad_hy, grad_cy, mode,
             size, projected, layers, batch_first, dropout, train, both, batch_sizes, state,
             reserve, mask):  # fmt: skip
    check_block(block, weight)
    assert torch.equal(reserve[:-13], output.contiguous().view(torch.uint8).flatten())
    assert bool((reserve[-13:] == 1).all())
    leaves = [source, hx, *([] if cx is None else [cx]), *weight]
    settings = (mode, layers, batch_first, train, both, stride == 4)
    # In a thread of its own: a kernel runs below autograd, and so would all that it calls.
    with ThreadPoolExecutor(1) as other:
        found = other.submit(
            gradients, leaves, cx is not None, settings, (grad_output, grad_hy, grad_cy)
        ).result()
    reserve.fill_(99)
    dx, dhx, *rest = found
    dcx = rest.pop(0) if cx is not None else None
    together = torch.zeros(block.numel())
    views, at = [], PADDING
    for gradient in rest:
        views.append(together[at : at + gradient.numel()].view(gradient.shape).copy_(gradient))
        at += gradient.numel()
    return dx, dhx, dcx, views


def flatten(weight, stride, width, mode, size, projected, layers, batch_first, both):
    block = torch.zeros(sum(w.numel() for w in weight) + PADDING)
    at = PADDING
    for w in weight:
        part = block[at : at + w.numel()].view(w.shape).copy_(w)
        w.data = part
        at += w.numel()
    return block


def check_block(block: Tensor, weight: list[Tensor]) -> None:
    parts = torch.cat([w.detach().flatten() for w in weight])
    assert torch.equal(block[PADDING:], parts), "the block does not hold the weights"


class Played(torch.autograd.Function):
    """What eager does with cuDNN's kernels."""

    @staticmethod
    def forward(ctx, name, settings, source, hx, cx, *weight):
        stride, layers, train, both, batch_first = settings
        block = flatten([w.detach().clone() for w in weight], *[None] * 8)
        tail = (cudnn_rnn.MODES[name], hx.shape[2], 0, layers, batch_first, 0.0, train, both)
        output, hy, cy, reserve, block = forward(
            source, weight, stride, block, hx, cx, *tail, [], None
        )
        ctx.save_for_backward(source, hx, cx, output, reserve, block, *weight)
        ctx.set_materialize_grads(False)
        ctx.tail = stride, tail
        return (output, hy) if cx is None else (output, hy, cy)

    @staticmethod
    def backward(ctx, grad_output, grad_hy, grad_cy=None):
        source, hx, cx, output, reserve, block, *weight = ctx.saved_tensors
        stride, tail = ctx.tail
        dx, dhx, dcx, dw = backward(
            source, weight, stride, block, hx, cx, output, grad_output, grad_hy, grad_cy, *tail,
            [], None, reserve, [True] * 4,
        )  # fmt: skip
        return (None, None, dx, dhx, dcx, *dw)


def eager(name, function, source, hidden, weight, bias, layers, dropout, train, both, batch_first):
    hx, cx = hidden if name == "lstm" else (hidden, None)
    settings = (4 if bias else 2, layers, train, both, batch_first)
    return Played.apply(name, settings, source, hx, cx, *weight)


@pytest.fixture
def cudnn(monkeypatch: pytest.MonkeyPatch):
    """cuDNN played on the CPU, for eager and for us."""
    monkeypatch.setattr(cudnn_rnn, "forward_kernel", forward)
    monkeypatch.setattr(cudnn_rnn, "backward_kernel", backward)
    monkeypatch.setattr(cudnn_rnn, "flatten_kernel", flatten)
    monkeypatch.setattr(cudnn_rnn, "is_acceptable", lambda tensor: True)
    monkeypatch.setattr(cudnn_rnn, "_answers", {})
    monkeypatch.setattr(cudnn_rnn, "_places", {})
    with recurrent_layers_call(eager):
        yield


class Tagger(nn.Module):
    def __init__(self, layer: nn.Module, own_state: bool) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 8)
        self.layer = layer
        self.head = nn.LazyLinear(3)
        self.own_state = own_state

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.embed(x))
        layer = self.layer
        batch = x.shape[0 if layer.batch_first else 1]
        num = layer.num_layers * (2 if layer.bidirectional else 1)
        state = None
        if self.own_state:
            state = h.mean(dim=(0, 1)).expand(num, batch, 8).contiguous()
            state = (state, state * 2) if isinstance(layer, nn.LSTM) else state
        out, last = layer(h, state)
        last = last[0] if isinstance(last, tuple) else last
        return self.head(torch.relu(out)) + last.mean()


KINDS = {
    "lstm": lambda: nn.LSTM(8, 8, batch_first=True),
    "lstm-deep": lambda: nn.LSTM(8, 8, num_layers=2, bidirectional=True),
    "gru": lambda: nn.GRU(8, 8, num_layers=2, bias=False),
    "rnn-tanh": lambda: nn.RNN(8, 8, batch_first=True),
    "rnn-relu": lambda: nn.RNN(8, 8, nonlinearity="relu"),
}


def tagger(kind: str, device: torch.device, *, own_state: bool = False, flat: bool = True):
    torch.manual_seed(0)
    model = Tagger(KINDS[kind](), own_state)
    model(torch.zeros(2, 2, 6))
    model = model.to(device)
    if flat and device == CPU:
        flatten(list(model.layer._flat_weights), *[None] * 8)
    return example_of(model, lambda step: gaussian(step, device, 4, 5, 6, requires_grad=True))


@EVERY_SCHEDULE
@pytest.mark.parametrize("kind", KINDS)
def test_recurrent_layers(kind: str, schedule: str, cudnn) -> None:
    managed, _ = assert_trains_alike(lambda: tagger(kind, CPU, own_state=True), schedule, CPU)
    names = [op.name for op in managed.plan.problem.ops]
    assert sum("rekindle.cudnn_rnn.default" in n for n in names) == 1
    assert sum("rekindle.cudnn_rnn_backward.default" in n for n in names) == 1


@pytest.mark.parametrize("schedule", ["keep-all", "thrice"])
def test_weights_that_lie_apart(schedule: str, cudnn) -> None:
    assert_trains_alike(lambda: tagger("lstm", CPU, flat=False), schedule, CPU)


@pytest.mark.parametrize("schedule", ["keep-all", "thrice"])
def test_frozen_weights(schedule: str, cudnn) -> None:
    def make() -> Example:
        made = tagger("lstm-deep", CPU)
        made.model.layer.requires_grad_(False)
        return made

    assert_trains_alike(make, schedule, CPU)


def test_the_reserve_is_counted_and_overwritten(cudnn) -> None:
    """A value of the size that the kernel chose, which the backward op writes over in place."""
    plan = manage(tagger("lstm", CPU)).plan
    [first] = [op for op in plan.program.ops if "cudnn_rnn.default" in op.name]
    [second] = [op for op in plan.program.ops if "cudnn_rnn_backward" in op.name]
    sizes = {plan.program.values[v].size_bytes for v in first.outputs}
    assert 4 * 5 * 8 * 4 + 13 in sizes
    [(old, new)] = second.inplace
    assert plan.program.values[old].size_bytes == 4 * 5 * 8 * 4 + 13
    gradients = [plan.program.values[v].size_bytes for v in second.outputs if v != new]
    weights = sum(w.numel() for w in nn.LSTM(8, 8).parameters())
    assert (weights + PADDING) * 4 in gradients, "the weights' gradients are one block"


def test_backward_twice(cudnn) -> None:
    """retain_graph keeps the reserve for the second backward."""
    example = tagger("lstm", CPU)
    managed = manage(example, "sqrt")
    out = managed(*example.inputs(0)[0]).square().mean()
    found = []
    for keep in (True, False):
        managed.zero_grad()
        out.backward(retain_graph=keep)
        found.append([p.grad.clone() for p in managed.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_profiles_of_recurrent_layers(cudnn, monkeypatch: pytest.MonkeyPatch) -> None:
    """A profile runs one call again and again, on what the run before has left of the reserve."""

    def lenient(*args):
        output, reserve = args[6], args[20]
        reserve[:-13] = output.contiguous().view(torch.uint8).flatten()
        reserve[-13:] = 1
        return backward(*args)

    monkeypatch.setattr(cudnn_rnn, "backward_kernel", lenient)
    managed = manage(tagger("lstm", CPU), profile="measure")
    assert managed.plan.profile.not_measured == ()


def test_dropout_between_layers_is_refused_by_name(cudnn) -> None:
    example = tagger("lstm-deep", CPU)
    example.model.layer.dropout = 0.1
    with pytest.raises(CaptureError, match=r"lstm.*dropout=0"):
        manage(example)


def test_autocast_is_refused_by_name(cudnn) -> None:
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(CaptureError, match="autocast"):
        manage(tagger("lstm", CPU))


GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="cuDNN needs a CUDA device"),
]


def on_cuda(*cases):
    return [pytest.param(*(c if isinstance(c, tuple) else (c,)), marks=GPU) for c in cases]


@EVERY_SCHEDULE
@pytest.mark.parametrize("kind", on_cuda(*KINDS))
def test_recurrent_layers_on_cuda(kind: str, schedule: str) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    assert_trains_alike(lambda: tagger(kind, device, own_state=True), schedule, device)


@pytest.mark.parametrize("kind", on_cuda("lstm-deep", "gru"))
def test_weights_that_lie_apart_on_cuda(kind: str) -> None:
    device = torch.device("cuda", torch.cuda.current_device())

    def make() -> Example:
        made = tagger(kind, device)
        for name, weight in list(made.model.layer.named_parameters()):
            apart = nn.Parameter(weight.detach().clone())
            made.model.layer._parameters[name] = apart
        layer = made.model.layer
        layer._flat_weights = [getattr(layer, name) for name in layer._flat_weights_names]
        return made

    with warnings.catch_warnings():
        # cuDNN's, once in a process: the weights are no "single contiguous chunk of memory".
        warnings.simplefilter("ignore", UserWarning)
        expected = train(make())
        example = make()
        assert_same(expected, train(example, manage(example, "thrice")))


@pytest.mark.parametrize("dropout", on_cuda(0.2))
def test_dropout_on_cuda_is_refused_by_name(dropout: float) -> None:
    model = nn.LSTM(8, 8, num_layers=2, dropout=dropout).cuda()
    example = example_of(
        model, lambda step: gaussian(step, torch.device("cuda"), 3, 2, 8), lambda out: out[0].sum()
    )
    with pytest.raises(CaptureError, match="dropout=0"):
        manage(example)
