"""The chains of blocks that Rockmate (Fig. 12) and HiRemate (C.1.3) report, on graphs written down
at the size of their ops: a dropout, a normalization, a linear layer is one op; a sum joins the op
that reads it where that one is the next through which everything passes."""

import pytest

from rekindle.core import Problem
from rekindle.core.generate import TrainingGraph
from rekindle.partition.separators import find_rows
from rekindle.solve.hierarchy.rockmate import Blocks


class Model:
    """Forward ops by kind; an op's cost and size follow from its kind and width."""

    def __init__(self) -> None:
        self.graph = TrainingGraph()

    def op(self, kind: str, *inputs: int, width: int = 8) -> int:
        cost = 10 * width + sum(map(ord, kind))
        weight = 4 * width if kind in ("linear", "conv", "norm", "embed") else None
        return self.graph.forward(
            kind, cost, inputs, 100 * width, saves_inputs=True, weight_size=weight
        )

    def row(self, kinds: str, x: int, width: int = 8) -> int:
        for kind in kinds.split():
            x = self.op(kind, x, width=width)
        return x


def gpt(num_layers: int) -> Problem:
    model = Model()
    tokens, places = model.graph.resident("tokens"), model.graph.resident("places")
    x = model.op("dropout", model.op("embed", tokens), model.op("embed", places, width=2))
    for k in range(num_layers):
        qkv = model.row("norm linear", x)
        weights = model.row("softmax dropout", model.op("scores", qkv), width=16)
        y = model.row("linear dropout", model.op("mix", weights, qkv))
        x = model.op("sum", x, y)
        y = model.row("norm linear gelu linear dropout", x)
        x = model.op("sum" if k < num_layers - 1 else "norm", x, y)
    return model.graph.finish([model.op("linear", x, width=50)], "gpt")


def mixer(num_layers: int = 12) -> Problem:
    model = Model()
    x = model.op("conv", model.graph.resident("image"))
    for k in range(num_layers):
        x = model.op("sum", x, model.row("norm conv gelu conv", x))
        y = model.row("norm linear gelu linear", x)
        x = model.op("sum" if k < num_layers - 1 else "norm", x, y)
    return model.graph.finish([model.row("mean linear", x, width=3)], "mixer")


def residual(stem: str, stages: tuple[int, ...]) -> Problem:
    """Normalizations hold the in-place activation behind them, sums as well. The first block of a
    stage has a branch of its own on the short way."""
    model = Model()
    x = model.row(stem, model.graph.resident("image"))
    for stage, depth in enumerate(stages):
        width = 8 << stage
        for k in range(depth):
            y = model.row("conv norm conv norm conv norm", x, width=width)
            short = model.row("conv norm", x, width=width) if k == 0 else x
            x = model.op("sum", y, short, width=width)
    return model.graph.finish([model.row("mean linear", x, width=5)], "residual")


def transformer(num_layers: int) -> Problem:
    """Post-norm encoder and decoder: sums are part of the normalizations behind them."""
    model = Model()
    source, target = model.graph.resident("source"), model.graph.resident("target")

    def attend(x: int, memory: int | None = None) -> int:
        if memory is None:
            return model.row("linear copy attention copy linear dropout", x)
        keys = model.row("linear copy", memory, width=16)
        mixed = model.op("attention", model.op("linear", x), keys)
        return model.row("copy linear dropout", mixed)

    def add_and_norm(x: int, y: int) -> int:
        return model.op("norm", y) if x in (source, target) else model.op("norm", x, y)

    def feed(x: int) -> int:
        return add_and_norm(x, model.row("linear relu dropout linear dropout", x))

    x = source
    for _ in range(num_layers):
        x = feed(add_and_norm(x, attend(x)))
    memory = model.op("norm", x)
    x = target
    for _ in range(num_layers):
        x = add_and_norm(x, attend(x))
        x = feed(add_and_norm(x, attend(x, memory)))
    return model.graph.finish([model.op("norm", x)], "transformer")


@pytest.mark.parametrize(
    ("problem", "num_blocks", "num_kinds"),
    [
        pytest.param(gpt(12), 26, 5, id="GPT-12"),
        pytest.param(residual("conv norm pool", (3, 4, 23, 3)), 38, 13, id="ResNet-101"),
        pytest.param(residual("conv norm", (2, 7, 13, 1)), 27, 11, id="RegNet"),
        pytest.param(mixer(), 27, 6, id="Mixer"),
    ],
)
def test_the_chain_is_the_published_one(problem, num_blocks, num_kinds):
    blocks = Blocks(problem, find_rows(problem))
    assert (len(blocks.parts), blocks.num_distinct) == (num_blocks, num_kinds)


@pytest.mark.parametrize("num_layers", [2, 24])
def test_a_deeper_gpt_has_no_more_kinds(num_layers):
    blocks = Blocks(gpt(num_layers), find_rows(gpt(num_layers)))
    assert (len(blocks.parts), blocks.num_distinct) == (2 * num_layers + 2, 5)


def test_an_encoder_is_a_chain_though_the_decoder_has_an_input_of_its_own():
    """C.1.3. What needs no gradient counts for nothing, so the encoder's first layer falls into
    its ops, each further one into two blocks; all decoder layers read the encoder's result and are
    one block up to the last one's feed-forward. (The paper has 24: two more of one op.)"""
    problem = transformer(6)
    rows = find_rows(problem)
    assert [len(ops) for ops in rows.forward] == [1] * 7 + [6] + [7, 6] * 5 + [1, 120, 6, 1]
    assert len(rows) == 22
