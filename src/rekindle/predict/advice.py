"""What would help a plan further: a loss that may not fit beside it, a host that is too slow."""

from rekindle.core import Schedule, simulate
from rekindle.predict.predictor import Predictor
from rekindle.report import format

HOST_IS_SLOW = 1.1  # times the device's time
LOSS_MAKES = 2  # times the outputs, beside their gradients: cross-entropy, of what is common


def advice(
    predictor: Predictor, schedule: Schedule, budget_bytes: int | None, cuda_graph: bool
) -> str:
    """A sentence a line; without a budget, the schedule's own peak is what to stay within."""
    # What moves values cannot be a CUDA graph.
    graphed = cuda_graph or bool(schedule.transfers)
    found = ["" if graphed else _slow_host(predictor, schedule)]
    found.append(_loss_outside(predictor, schedule, budget_bytes))
    return "\n".join(filter(None, found))


def _loss_outside(predictor: Predictor, schedule: Schedule, budget_bytes: int | None) -> str:
    """That the caller's loss, which no plan counts, may need more than there is."""
    problem, joint = predictor.problem, predictor.program.joint
    loss = problem.loss_op
    outputs = joint.differentiated
    makes = LOSS_MAKES * sum(o.numel() * o.element_size() for o in outputs if o.dim())
    if loss is None or not makes:
        return ""
    trace = simulate(problem, schedule)
    # While the loss runs the model's outputs are held, and so is all that the backward will read.
    memory = trace.memory[schedule.steps.index(loss)]
    limit = trace.peak if budget_bytes is None else budget_bytes
    if memory + makes <= limit:
        return ""
    return (
        f"The loss is outside the plan. One such as cross-entropy makes "
        f"{format.size(problem, makes)} for itself, which comes to "
        f"{format.size(problem, memory + makes)} then, with {format.size(problem, limit)} to "
        f"stay within: loss_fn= takes the loss into the plan."
    )


def _slow_host(predictor: Predictor, schedule: Schedule) -> str:
    """That a GPU waits for the host, where it does."""
    if predictor.profile.kind != "cuda":
        return ""
    issued, done = predictor.stream_sums(schedule)
    if issued <= HOST_IS_SLOW * done:
        return ""
    return (
        f"The host needs {issued / 1e6:.3g} ms to issue a step that the GPU runs in "
        f"{done / 1e6:.3g} ms: cuda_graph=True records the step and takes the difference away."
    )
