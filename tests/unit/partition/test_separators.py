"""Where a forward graph falls into blocks."""

from dataclasses import replace

import pytest
from support.clocks import count_lines

from rekindle.core import Op, Problem, Value, check_problem, generate
from rekindle.partition.chain import find_chain
from rekindle.partition.separators import find_rows


class Net:
    """A training step written op by op: a forward op with a backward op that reads what it read."""

    def __init__(self):
        self.values = []
        self.ops = []
        self.tape = []

    def value(self, size=10):
        self.values.append(Value(f"v{len(self.values)}", size))
        return len(self.values) - 1

    def plain(self, *inputs, size=10, recomputable=True):
        """A forward op that needs no gradient."""
        out = self.value(size)
        self.ops.append(
            Op(f"f{len(self.ops)}", 1, inputs, (out,), recomputable=recomputable, phase="forward")
        )
        return out

    def layer(self, *inputs, needs=None, size=10, token=None):
        out = self.value(size)
        outputs = (out,)
        reads = inputs
        if token is not None:
            outputs = (out, self.value(0))
            reads = (*inputs, token) if token >= 0 else inputs
        self.tape.append((len(self.ops), inputs if needs is None else needs, inputs, out))
        self.ops.append(Op(f"f{len(self.ops)}", 1, reads, outputs, phase="forward"))
        return out if token is None else outputs

    def finish(self, *results, grad_of=True):
        grads = {v: self.value() for v in results}
        self.ops.append(Op("loss", 1, tuple(results), tuple(grads.values()), phase="loss"))
        outputs = []
        for op_id, needs, inputs, out in reversed(self.tape):
            made = [self.value() for v in needs] or [self.value(1)]
            self.ops.append(
                Op(
                    f"b{op_id}",
                    1,
                    (*inputs, grads[out]),
                    tuple(made),
                    phase="backward",
                    grad_of=op_id if grad_of else None,
                )
            )
            if not needs:
                outputs += made
            for v, grad in zip(needs, made, strict=False):
                if v in grads:
                    total = self.value()
                    self.ops.append(Op("sum", 1, (grads[v], grad), (total,), phase="backward"))
                    grad = total
                grads[v] = grad
        problem = Problem(tuple(self.values), tuple(self.ops), outputs=tuple(outputs))
        check_problem(problem)
        return problem


@pytest.mark.parametrize("grad_of", [True, False])
def test_a_row_of_layers(grad_of):
    net = Net()
    x = net.layer()
    for _ in range(5):
        x = net.layer(x)
    rows = find_rows(net.finish(x, grad_of=grad_of))
    assert [len(b) for b in rows.forward] == [1] * 6
    # Without grad_of, the backward of the first layer, which reads no activation, comes early.
    assert [len(b) for b in rows.backward] == ([1] * 6 if grad_of else [0, 2, 1, 1, 1, 1])
    assert [len(c) for c in rows.crossing] == [1] * 5 + [0]


def test_residual_branches_stay_in_their_block():
    net = Net()
    x = net.layer()
    for _ in range(4):
        x = net.layer(x, net.layer(net.layer(x)))
    rows = find_rows(net.finish(x))
    assert [len(b) for b in rows.forward] == [1, 3, 3, 3, 3]


def test_a_skip_over_everything_is_no_chain():
    net = Net()
    first = x = net.layer()
    for _ in range(4):
        x = net.layer(x)
    reason = find_rows(net.finish(net.layer(x, first)))
    # Only the source and the end are left: one block before, one after.
    assert [len(b) for b in reason.forward] == [1, 5]


def test_a_mask_for_all_blocks_does_not_join_them():
    """HiRemate C.1.3: it needs no gradient and is read by every block."""
    net = Net()
    mask = net.plain(size=7)
    table = net.plain(mask, size=5)
    x = net.layer()
    for _ in range(4):
        x = net.layer(x, mask, table, needs=(x,))
    problem = net.finish(x)
    rows = find_rows(problem)
    assert len(rows) == 5
    assert rows.prelude == (0, 1)
    assert find_chain(problem).base == 12


def test_what_one_block_alone_reads_belongs_to_it():
    net = Net()
    x = net.layer()
    mask = net.plain()
    for _ in range(3):
        x = net.layer(x)
    x = net.layer(x, mask, needs=(x,))
    rows = find_rows(net.finish(x))
    assert rows.prelude == ()
    assert rows.forward[-1] == (1, 5)


def test_a_second_input_that_comes_late_does_not_join_the_blocks_before():
    """An encoder and a decoder: the target's own layers are listed first, and needed late."""
    net = Net()
    target = net.layer(net.layer())
    x = net.layer()
    for _ in range(6):
        x = net.layer(x)
    x = net.layer(x, target)
    x = net.layer(x)
    rows = find_rows(net.finish(x))
    assert [len(b) for b in rows.forward] == [1, 1, 1, 1, 1, 1, 1, 3, 1]


def test_order_values_of_size_zero_do_not_join_blocks():
    net = Net()
    x, token = net.layer(token=-1)
    for _ in range(4):
        x, token = net.layer(x, token=token)
    assert len(find_rows(net.finish(x))) == 5


def test_the_order_of_random_ops_does_not_bring_a_second_input_early():
    """The target's random layer stands behind the source's in the order of random ops, and its way
    seems longer by that; the source's chain still comes whole before it."""
    net = Net()
    x, token = net.layer(token=-1)
    for _ in range(4):
        x, token = net.layer(x, token=token)
    after = net.layer(net.layer(x))
    target, token = net.layer(token=token)
    for _ in range(3):
        target, token = net.layer(target, token=token)
    rows = find_rows(net.finish(net.layer(net.layer(after, target))))
    assert [len(b) for b in rows.forward] == [1] * 7 + [5, 1]


def test_ops_that_begin_a_chain_side_by_side_are_one_block():
    net = Net()
    x = net.layer(net.layer(), net.layer())
    rows = find_rows(net.finish(net.layer(net.layer(x))))
    assert [len(b) for b in rows.forward] == [3, 1, 1]


def test_two_results_leave_the_chain_whole():
    """A hidden state that is returned too is kept for the loss, beside the chain."""
    net = Net()
    x = hidden = net.layer(size=3)
    x = hidden = net.layer(x, size=3)
    for _ in range(4):
        x = net.layer(x)
    problem = net.finish(x, hidden)
    rows = find_rows(problem)
    assert len(rows) == 6
    assert rows.aside == {hidden}
    assert find_chain(problem).base == 3


def test_run_once_results_stay():
    net = Net()
    x = net.layer()
    noise = net.plain(x, recomputable=False, size=4)
    for _ in range(3):
        x = net.layer(x, noise, needs=(x,))
    problem = net.finish(x)
    rows = find_rows(problem)
    assert noise in rows.pinned
    assert len(rows) >= 3


def test_backward_that_reads_inside_a_later_block_joins_them():
    net = Net()
    x = net.layer()
    inner = []
    for _ in range(5):
        inner.append(net.layer(x))
        x = net.layer(x, inner[-1])
    problem = net.finish(x)
    assert len(find_rows(problem)) == 6
    ops = list(problem.ops)
    # The backward of the second block's last op also reads from inside the fourth block.
    k = next(i for i, op in enumerate(ops) if op.grad_of == 4)
    ops[k] = replace(ops[k], inputs=(*ops[k].inputs, inner[3]))
    rows = find_rows(replace(problem, ops=tuple(ops)))
    assert [len(b) for b in rows.forward] == [1, 2, 6, 2]


def test_blocks_are_joined_evenly_to_a_maximum():
    problem = generate.chain(40, 0)
    rows = find_rows(problem, max_blocks=10)
    assert len(rows) == 10
    assert sum(len(b) for b in rows.forward) == 40
    assert max(len(b) for b in rows.forward) <= 12


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda op: replace(op, phase=None), "no phase"),
        (lambda op: replace(op, phase="forward"), "no backward"),
    ],
)
def test_other_graphs_are_refused(change, word):
    problem = generate.chain(5, 0)
    ops = tuple(change(op) if op.phase != "loss" else op for op in problem.ops)
    assert word in find_rows(replace(problem, ops=ops))


def test_a_graph_without_separators_is_refused():
    net = Net()
    reason = find_rows(net.finish(net.layer()))
    assert isinstance(reason, str)
    assert "no chain" in reason


def test_two_rows_that_cross_have_one_block_after_their_source():
    net = Net()
    x = net.layer()
    x, y = net.layer(x), net.layer(x)
    for _ in range(3):
        x, y = net.layer(x, y), net.layer(x, y)
    rows = find_rows(net.finish(x, y))
    assert [len(b) for b in rows.forward] == [1, 8]


def test_linear_time():
    """Ten times the ops take ten times the steps."""
    num_lines = []
    for num_layers in (300, 3_000):
        problem = generate.chain(num_layers, 0)
        num_lines.append(count_lines(lambda problem=problem: find_rows(problem)))
        assert len(find_rows(problem)) == num_layers
    assert num_lines[1] < 11 * num_lines[0]
