"""Training graphs: a forward written op by op, the loss, and the backward that follows from it.

`TrainingGraph` plays autograd: each forward op says which values its backward reads; the backward
op of each forward op makes the gradients of its inputs and of its weight; gradients that meet are
summed by their own ops, in place where that is possible. The gradients of the weights are the
problem's outputs, the model's outputs are held.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from rekindle.core.problem import Op, Problem, Value


@dataclass(frozen=True, slots=True)
class _Forward:
    op_id: int
    backward_cost: int
    inputs: tuple[int, ...]  # those that need a gradient
    output: int
    saves: tuple[int, ...]
    weight: int | None
    workspace: int


class TrainingGraph:
    """Builds a problem: `resident` and `forward` in execution order, then `finish` once."""

    def __init__(self) -> None:
        self._values: list[Value] = []
        self._ops: list[Op] = []
        self._resident: dict[int, None] = {}  # in order of appearance
        self._tape: list[_Forward] = []

    def resident(self, name: str, size: int = 0) -> int:
        """A user input: always there, needs no gradient."""
        value = self._value(name, size)
        self._resident[value] = None
        return value

    def forward(
        self,
        name: str,
        cost: int,
        inputs: Sequence[int],
        size: int,
        *,
        saves_inputs: bool = False,
        saves_output: bool = False,
        side_size: int | None = None,
        weight_size: int | None = None,
        workspace: int = 0,
        backward_cost: int | None = None,
        backward_workspace: int | None = None,
        recomputable: bool = True,
    ) -> int:
        """Adds a forward op and returns the value it makes.

        `side_size` is a second output that only the backward reads (a mask, statistics). The
        backward costs twice the forward with a weight, else as much, unless told otherwise.
        """
        op_id = len(self._ops)
        output = self._value(name, size)
        # What autograd would save: a linear layer its input, a ReLU its output, dropout its mask.
        saves = list(inputs) if saves_inputs else []
        outputs = [output]
        if side_size is not None:
            outputs.append(self._value(f"{name}.side", side_size))
            saves.append(outputs[1])
        if saves_output:
            saves.append(output)
        reads = list(inputs)
        weight = None
        if weight_size is not None:
            weight = self._value(f"{name}.weight", weight_size)
            self._resident[weight] = None
            reads.append(weight)
        self._ops.append(
            Op(
                name=name,
                cost=cost,
                inputs=tuple(reads),
                outputs=tuple(outputs),
                workspace=workspace,
                recomputable=recomputable,
                phase="forward",
            )
        )
        # A layer with a weight computes two gradients in its backward, each as dear as its forward.
        if backward_cost is None:
            backward_cost = cost if weight is None else 2 * cost
        self._tape.append(
            _Forward(
                op_id=op_id,
                backward_cost=backward_cost,
                # User inputs and weights are resident: of these only weights get a gradient.
                inputs=tuple(v for v in inputs if v not in self._resident),
                output=output,
                saves=tuple(saves),
                weight=weight,
                workspace=workspace if backward_workspace is None else backward_workspace,
            )
        )
        return output

    def finish(
        self,
        outputs: Sequence[int],
        name: str,
        *,
        loss_cost: int = 0,
        loss_workspace: int = 0,
        cost_unit: str = "ns",
    ) -> Problem:
        """The loss and the backward of everything that `outputs` (the model's) depend on."""
        # The loss op stands for the caller's work: it reads the model's outputs and hands back
        # their gradients.
        grads = [self._grad(v) for v in outputs]
        self._ops.append(
            Op("loss", loss_cost, tuple(outputs), tuple(grads), loss_workspace, phase="loss")
        )
        grad_of = dict(zip(outputs, grads, strict=True))
        weight_grads: list[int] = []
        # As autograd does: backwards over the tape, without what the outputs do not depend on.
        for entry in reversed(self._tape):
            if entry.output in grad_of:
                self._backward(entry, grad_of, weight_grads)
        return Problem(
            values=tuple(self._values),
            ops=tuple(self._ops),
            resident=tuple(self._resident),
            outputs=tuple(weight_grads),
            held=tuple(outputs),
            name=name,
            cost_unit=cost_unit,
        )

    def _backward(self, entry: _Forward, grad_of: dict[int, int], weight_grads: list[int]) -> None:
        name = self._ops[entry.op_id].name
        made = [self._grad(v) for v in entry.inputs]
        reads = [grad_of[entry.output], *entry.saves]
        outputs = list(made)
        if entry.weight is not None:
            if entry.inputs:
                reads.append(entry.weight)
            outputs.append(self._grad(entry.weight))
            weight_grads.append(outputs[-1])
        # A user input alone needs no backward.
        if not outputs:
            return
        self._ops.append(
            Op(
                name=f"{name}.backward",
                cost=entry.backward_cost,
                inputs=tuple(dict.fromkeys(reads)),
                outputs=tuple(outputs),
                workspace=entry.workspace,
                phase="backward",
                grad_of=entry.op_id,
            )
        )
        # A value that several ops read gets a gradient from each; they are summed as they come in.
        for v, grad in zip(entry.inputs, made, strict=True):
            grad_of[v] = self._sum(grad_of[v], grad) if v in grad_of else grad

    def _sum(self, first: int, second: int) -> int:
        total = self._value(f"{self._values[first].name}.sum", self._values[first].size)
        self._ops.append(
            Op(
                name=self._values[total].name,
                # Memory-bound: in proportion to the bytes.
                cost=1 + self._values[first].size // 256,
                inputs=(first, second),
                outputs=(total,),
                inplace=((first, total),),
                phase="backward",
            )
        )
        return total

    def _grad(self, value: int) -> int:
        return self._value(f"grad.{self._values[value].name}", self._values[value].size)

    def _value(self, name: str, size: int) -> int:
        self._values.append(Value(name, size))
        return len(self._values) - 1


def chain(num_layers: int, seed: int = 0, *, uniform: bool = False) -> Problem:
    """Layer after layer, each with a weight; the backward reads each layer's input.

    With `uniform` all layers are alike; else sizes, costs and workspaces differ from layer to
    layer, and some layers save their output in place of their input.
    """
    rng = Random(seed)
    graph = TrainingGraph()
    x = graph.resident("input", 1000)
    for k in range(num_layers):
        if uniform:
            x = graph.forward(f"layer{k}", 100, [x], 1000, saves_inputs=True, weight_size=10)
            continue
        # Some layers have a backward that needs their output alone, as tanh has.
        saves_output = rng.random() < 0.3
        x = graph.forward(
            f"layer{k}",
            rng.randint(1, 1000),
            [x],
            rng.randint(100, 5000),
            saves_inputs=not saves_output,
            saves_output=saves_output,
            side_size=rng.randint(0, 500) if rng.random() < 0.2 else None,
            weight_size=rng.randint(1, 100),
            workspace=rng.choice((0, 0, rng.randint(1, 2000))),
            backward_cost=rng.randint(1, 2000),
        )
    return graph.finish([x], f"chain-{num_layers}-{seed}", cost_unit="unit")


def unet(depth: int, seed: int = 0, *, blocks: int = 2, pixels: int = 64 * 64) -> Problem:
    """A U-net: `depth` levels down, `depth` up, with a skip from each level to its mirror."""
    rng = Random(seed)
    graph = TrainingGraph()
    # The seed decides the width, so that problems of one depth differ in sizes and in costs.
    channels = 8 + 8 * rng.randrange(3)
    x = graph.resident("image", 4 * 3 * pixels)

    def block(x: int, name: str, level: int, num_in: int, num_out: int) -> int:
        area = pixels >> (2 * level)
        size, flops = 4 * area * num_out, 18 * area * num_in * num_out
        x = graph.forward(
            f"{name}.conv",
            flops // 1000 + 1,
            [x],
            size,
            saves_inputs=True,
            weight_size=36 * num_in * num_out,
            workspace=9 * size // 4,
        )
        x = graph.forward(
            f"{name}.norm",
            size // 100 + 1,
            [x],
            size,
            saves_inputs=True,
            side_size=8 * num_out,
            weight_size=8 * num_out,
        )
        return graph.forward(f"{name}.relu", size // 200 + 1, [x], size, saves_output=True)

    # Kept from the way down to the way up: what makes a U-net hard for methods on chains.
    skips: list[tuple[int, int]] = []
    num_in = 3
    for level in range(depth):
        num_out = channels << level
        for b in range(blocks):
            x = block(x, f"down{level}.{b}", level, num_in, num_out)
            num_in = num_out
        skips.append((x, num_out))
        area = pixels >> (2 * level + 2)
        # A pool saves the places of its maxima.
        x = graph.forward(f"pool{level}", area, [x], 4 * area * num_out, side_size=area * num_out)
    for b in range(blocks):
        x = block(x, f"middle.{b}", depth, num_in, channels << depth)
        num_in = channels << depth
    for level in reversed(range(depth)):
        skip, num_out = skips.pop()
        area = pixels >> (2 * level)
        x = graph.forward(f"up{level}", area, [x], 4 * area * num_in)
        x = graph.forward(
            f"concat{level}", area, [x, skip], 4 * area * (num_in + num_out), backward_cost=area
        )
        num_in += num_out
        for b in range(blocks):
            x = block(x, f"rise{level}.{b}", level, num_in, num_out)
            num_in = num_out
    x = graph.forward("head", pixels, [x], 4 * pixels, saves_inputs=True, weight_size=4 * num_in)
    return graph.finish([x], f"unet-{depth}-{seed}", loss_cost=pixels, cost_unit="unit")


def transformer(
    num_layers: int,
    seed: int = 0,
    *,
    batch: int = 2,
    sequence: int = 128,
    width: int = 64,
    vocabulary: int = 512,
    dropout: bool = False,
) -> Problem:
    """A decoder with fused attention; with `dropout`, its masks cannot be made twice."""
    decoder = _Decoder(Random(seed), batch, sequence, width, dropout)
    graph, noisy, tokens, stream = decoder.graph, decoder.noisy, decoder.tokens, decoder.stream
    ids = graph.resident("tokens", 8 * tokens)
    x = graph.forward(
        "embed",
        noisy(tokens * width),
        [ids],
        stream,
        saves_inputs=True,
        weight_size=4 * vocabulary * width,
    )
    for k in range(num_layers):
        x = decoder.block(x, f"h{k}")
    x = decoder.linear(decoder.norm(x, "norm"), "head", width, vocabulary)
    return graph.finish(
        [x],
        f"transformer-{num_layers}-{seed}",
        loss_cost=noisy(20 * tokens * vocabulary),
        loss_workspace=4 * tokens * vocabulary,
    )


class _Decoder:
    """The layers of `transformer`. The order of the `noisy` calls is part of the problem that a
    seed names: another order is another problem, and the golden schedules are gone."""

    def __init__(self, rng: Random, batch: int, sequence: int, width: int, dropout: bool) -> None:
        self.rng = rng
        self.graph = TrainingGraph()
        self.batch, self.sequence, self.width = batch, sequence, width
        self.dropout = dropout
        self.tokens = batch * sequence
        self.stream = 4 * self.tokens * width  # bytes of the residual stream, in float32

    def noisy(self, cost: int) -> int:
        """Measured times scatter: a few per cent around the count of operations."""
        return max(1, int(cost * self.rng.uniform(0.97, 1.03)) // 1000)

    def norm(self, x: int, name: str) -> int:
        return self.graph.forward(
            name,
            self.noisy(20 * self.tokens * self.width),
            [x],
            self.stream,
            saves_inputs=True,
            side_size=8 * self.tokens,  # mean and reciprocal deviation, float32
            weight_size=8 * self.width,
        )

    def linear(self, x: int, name: str, num_in: int, num_out: int) -> int:
        return self.graph.forward(
            name,
            self.noisy(2 * self.tokens * num_in * num_out),
            [x],
            4 * self.tokens * num_out,
            saves_inputs=True,
            weight_size=4 * num_in * num_out,
        )

    def attention(self, x: int, name: str) -> int:
        # Fused: the scores never exist as a value, so the forward saves a row statistic alone and
        # the backward computes them again, which is what its cost of 10 against 4 stands for.
        scores = self.batch * self.sequence * self.sequence * self.width
        return self.graph.forward(
            name,
            self.noisy(4 * scores),
            [x],
            self.stream,
            saves_inputs=True,
            saves_output=True,
            side_size=4 * self.tokens,
            backward_cost=self.noisy(10 * scores),
            backward_workspace=self.stream,
        )

    def residual(self, x: int, branch: int, name: str) -> int:
        cost = 10 * self.tokens * self.width
        if self.dropout:
            branch = self.graph.forward(
                f"{name}.dropout",
                self.noisy(cost),
                [branch],
                self.stream,
                side_size=self.tokens * self.width,  # the mask, one byte an element
                recomputable=False,
            )
        return self.graph.forward(name, self.noisy(cost), [x, branch], self.stream)

    def block(self, x: int, name: str) -> int:
        """Attention and the MLP, each with its norm before it and its residual behind it."""
        width = self.width
        y = self.linear(self.norm(x, f"{name}.norm1"), f"{name}.qkv", width, 3 * width)
        y = self.attention(y, f"{name}.attention")
        x = self.residual(x, self.linear(y, f"{name}.proj", width, width), f"{name}.add1")
        y = self.linear(self.norm(x, f"{name}.norm2"), f"{name}.fc1", width, 4 * width)
        y = self.graph.forward(
            f"{name}.gelu",
            self.noisy(40 * self.tokens * width),
            [y],
            4 * self.stream,
            saves_inputs=True,
        )
        return self.residual(x, self.linear(y, f"{name}.fc2", 4 * width, width), f"{name}.add2")
