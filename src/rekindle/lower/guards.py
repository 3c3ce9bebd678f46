"""What Python asked the data at capture, asked again at each call.

A model that reads a number from a tensor (`if mask.all()`) took one branch when it was captured.
The part of the graph that the number depends on runs before each call, on its own; where an answer
differs, the plan does not cover the call. What depends on constants alone needs no asking.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from rekindle.capture import JointGraph, op_effects
from rekindle.capture.node_facts import Source, facts, source_of
from rekindle.capture.recorder import Scalar
from rekindle.capture.subgraph import slice_of
from rekindle.errors import CaptureError
from rekindle.lower.codegen import compile_boxed
from rekindle.torch_compat import eager_kernels


class Guards:
    """The questions of one capture, compiled into one graph."""

    def __init__(self, joint: JointGraph) -> None:
        self.scalars = [s for s in joint.scalars if _kinds(joint, s) - {"constant"}]
        self.sources: list[Source] = []  # of what the questions are about
        self.run: Any = None
        if self.scalars:
            self._compile(joint)

    def _compile(self, joint: JointGraph) -> None:
        wanted = [n for s in self.scalars for n in _nodes(s)]
        needed = slice_of(joint.session.recorder.graph, wanted)
        written = {facts(n).storage for node in needed for n in facts(node).writes}
        graph = fx.Graph()
        made: dict[fx.Node, fx.Node] = {}
        for node in needed:
            if node.op == "placeholder":
                self.sources.append(source_of(node))
                made[node] = graph.placeholder(node.name)
        # A part that writes runs on copies: asking must change nothing of the caller's.
        for node in tuple(made):
            if facts(node).storage in written:
                made[node] = graph.call_function(torch.ops.aten.clone.default, (made[node],))
        asked = {id(s): s.num_before for s in self.scalars}
        position = {n: i for i, n in enumerate(joint.session.recorder.graph.nodes)}
        answers: list[fx.Node] = []
        questions = sorted(self.scalars, key=lambda s: asked[id(s)])
        self.scalars = questions
        at = 0
        for node in needed:
            # A question stands where Python asked it: what is written later must not be seen.
            while at < len(questions) and questions[at].num_before <= position[node]:
                answers.append(self._ask(graph, made, questions[at]))
                at += 1
            if node.op == "call_function":
                made[node] = graph.node_copy(node, made.__getitem__)
        answers += [self._ask(graph, made, q) for q in questions[at:]]
        graph.output(tuple(answers))
        self.run, _ = compile_boxed(graph, joint.changing)

    @staticmethod
    def _ask(graph: fx.Graph, made: dict[fx.Node, fx.Node], question: Scalar) -> fx.Node:
        args = fx.node.map_arg(question.args, made.__getitem__)
        return graph.call_function(question.target, args)

    def broken(self, residents: Sequence[torch.Tensor], sizes: Sequence[int] = ()) -> str | None:
        """None, or which answer differs; `residents` as `sources` counts them."""
        with eager_kernels():
            answers = self.run([*residents, *sizes])
        for question, answer in zip(self.scalars, answers, strict=True):
            # NaN is not equal to itself, and still the same answer.
            if answer != question.value and not (
                answer != answer and question.value != question.value
            ):
                at = f" at {question.where}" if question.where else ""
                return (
                    f"the model asks its data for a number{at}, which was {question.value} when "
                    f"it was captured and is {answer} now"
                )
        return None


def _nodes(scalar: Scalar) -> list[fx.Node]:
    return [a for a in scalar.args if isinstance(a, fx.Node)]


def _kinds(joint: JointGraph, scalar: Scalar) -> set[str]:
    needed = slice_of(joint.session.recorder.graph, _nodes(scalar), scalar.num_before)
    if any(op_effects.is_random(n.target) for n in needed):
        raise CaptureError(
            f"a branch of the model depends on a random number at {scalar.where}; draw it outside "
            "and pass it as an argument, or manage the submodules around it one by one"
        )
    return {source_of(n).kind for n in needed if n.op == "placeholder"}
