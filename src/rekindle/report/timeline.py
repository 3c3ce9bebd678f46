"""Memory over the steps of a schedule, stacked: by layer, by part, by kind.

The stack of each step is the simulator's memory of that step, exactly. For a picture, long
schedules are thinned: of each stretch the steps with the most and the least memory stay, so that no
peak is lost.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rekindle.core import Phase
from rekindle.report.account import KINDS, TEMPORARY, Account
from rekindle.report.module_paths import joined_names, numbered, shown, starred

MAX_SAMPLES = 1500  # about two to a pixel of a wide screen
MAX_BANDS = 7  # as many colours as people can tell apart; the rest share one more
MAX_STRETCHES = 500  # per lane
LANES = ("forward", "backward", "recompute")
FORWARD, BACKWARD, AGAIN = range(len(LANES))
TRANSFER_LANES = ("to the host", "from the host")  # of schedules that move values
SENDING, FETCHING = range(len(LANES), len(LANES) + len(TRANSFER_LANES))
OTHER = "everything else"


@dataclass(frozen=True, slots=True)
class View:
    """One way to stack: names of the bands from the bottom up, and per band its bytes at each
    sample."""

    name: str
    bands: tuple[str, ...]
    stacks: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Timeline:
    """What the memory picture draws, at no more samples than it has pixels for."""

    steps: tuple[int, ...]  # the samples
    starts: tuple[int, ...]  # per sample: the cost of all steps before
    memory: tuple[int, ...]
    keep_all: tuple[int, ...]  # what keep-all holds at the same point of the work
    views: tuple[View, ...]
    lanes: tuple[tuple[int, int, int, int, int], ...]  # lane, first step, end, first time, end
    until: tuple[int, ...]  # per sample: the last step that reads what it makes
    again: tuple[int, ...]  # per sample: the step at which its op runs next, or -1


def lane_names(account: Account) -> tuple[str, ...]:
    """As the lanes are called; in a problem that knows no phases there is no backward."""
    more = TRANSFER_LANES if account.schedule.transfers else ()
    if any(op.phase for op in account.problem.ops):
        return LANES + more
    return ("first run", "", LANES[AGAIN], *more)


def lane_of(account: Account, step: int) -> int:
    """The lane of a step; a drop waits on the lane of sends, and a release on it too."""
    what = account.schedule.steps[step]
    if isinstance(what, int):
        return lane(account.problem.ops[what].phase, account.run_before[step])
    return FETCHING if what[0] == "fetch" else SENDING


def call_of(account: Account, step: int) -> str:
    """What a step does, by its op; of a transfer, which value is moved."""
    what = account.schedule.steps[step]
    call = account.places[account.op_of_step[step]].call
    return call if isinstance(what, int) else f"{what[0]} what {call} made"


def lane(phase: Phase | None, run_before: bool) -> int:
    """The lane of the picture that a run belongs to."""
    if run_before:
        return AGAIN
    return BACKWARD if phase == "backward" else FORWARD


def timeline(account: Account) -> Timeline:
    """The samples of an account, with the memory of each stacked by layer, part and kind."""
    # One more than there are steps: a stretch ends where the next step would start.
    starts = account.starts
    steps = _thinned(account)
    until, again = _fates(account)
    # Of each op's own module: workspace and copies alike.
    modules = [place.module for place in account.places]
    by_layer = _bands(account, modules)
    by_part = _bands(account, [starred(module) for module in modules])
    return Timeline(
        steps=tuple(steps),
        starts=tuple(starts[t] for t in steps),
        memory=tuple(account.trace.memory[t] for t in steps),
        keep_all=_ghost(account, steps),
        views=(
            _view(account, steps, "layer", by_layer),
            _view(account, steps, "part", by_part),
            _view(account, steps, "kind", None),
        ),
        lanes=tuple(_lanes(account, starts)),
        until=tuple(until[t] for t in steps),
        again=tuple(again[t] for t in steps),
    )


def stacks(
    account: Account, num_bands: int, band_of_copy: Sequence[int], band_of_temporary: Sequence[int]
) -> list[list[int]]:
    """Per band its bytes at each step; at every step they add up to the simulator's memory."""
    num_steps = len(account.schedule)
    # Differences first, summed up once: time grows with the copies and the steps, not with their
    # product. A copy that outlives the schedule ends in the row's last cell, which is left out.
    change = [[0] * (num_steps + 1) for _ in range(num_bands)]
    sizes = [value.size for value in account.problem.values]
    for band, copy in zip(band_of_copy, account.copies, strict=True):
        change[band][copy.first] += sizes[copy.value_id]
        change[band][min(copy.last + 1, num_steps)] -= sizes[copy.value_id]
    found = [list(itertools.accumulate(row[:num_steps])) for row in change]
    for step, what in enumerate(account.schedule.steps):
        if isinstance(what, int):
            found[band_of_temporary[step]][step] += account.problem.ops[what].workspace
        # Written over a dying input: for this one step both share a storage.
        for k in account.dying[step]:
            found[band_of_copy[k]][step] -= sizes[account.copies[k].value_id]
    return found


def _view(
    account: Account, steps: Sequence[int], name: str, found: tuple[list[str], list[int]] | None
) -> View:
    if found is None:
        bands: list[str] = list(KINDS)
        whole = stacks(account, len(bands), account.kinds, [TEMPORARY] * len(account.schedule))
    else:
        bands, band_of_op = found
        of_step = [band_of_op[i] for i in account.op_of_step]
        whole = stacks(account, len(bands), [of_step[c.first] for c in account.copies], of_step)
    # A band that is empty at every step would only take a colour, and a line of the legend.
    used = [k for k in range(len(bands)) if any(whole[k])]
    thinned = tuple(tuple(whole[k][t] for t in steps) for k in used)
    return View(name, tuple(bands[k] for k in used), thinned)


# ---- which modules share a band


@dataclass(slots=True)
class _Branch:
    """A part of the model that may become a band, or be split into smaller ones."""

    name: str
    weight: int = 0
    own: set[str] = field(default_factory=set)  # module paths that are this very place
    children: dict[str, "_Branch"] = field(default_factory=dict)

    def modules(self) -> set[str]:
        return self.own.union(*(child.modules() for child in self.children.values()))


def _bands(account: Account, modules: Sequence[str]) -> tuple[list[str], list[int]]:
    """Names of the bands, and the band of each op: the heaviest part is split until there are
    enough; what is light stays together."""
    weights = _weights(account, modules)
    # What is less than half a per cent of the picture would be thinner than a line.
    heavy = _split(_grown(weights), sum(weights.values()) // 200)
    names = [shown(branch.name) for branch in heavy]
    band_of_module = {m: k for k, branch in enumerate(heavy) for m in branch.modules()}
    if len(band_of_module) < len(weights):
        names.append(OTHER)
    rest = len(names) - 1
    return names, [band_of_module.get(module, rest) for module in modules]


def _weights(account: Account, modules: Sequence[str]) -> dict[str, int]:
    """How much of the picture each module takes: its bytes over the steps, those at the peak as
    much again."""
    num_steps, peak_step = len(account.schedule), account.trace.peak_step
    weights = dict.fromkeys(modules, 0)
    for copy in account.copies:
        held = min(copy.last + 1, num_steps) - copy.first
        # The peak is what a reader looks at: what is alive there is to have a band of its own.
        if copy.first <= peak_step <= copy.last:
            held += num_steps
        size = account.problem.values[copy.value_id].size
        weights[modules[account.op_of_step[copy.first]]] += size * held
    return weights


def _grown(weights: dict[str, int]) -> _Branch:
    root = _Branch("")
    for module, weight in weights.items():
        branch = root
        branch.weight += weight
        for name in module.split(".") if module else ():
            path = f"{branch.name}.{name}" if branch.name else name
            branch = branch.children.setdefault(name, _Branch(path))
            branch.weight += weight
        branch.own.add(module)
    return root


def _split(root: _Branch, light: int) -> list[_Branch]:
    """The branches that become bands, in the order of the model; light parts are left out."""
    branches = [root]
    while True:
        # The branch that is split makes room for one more part than there are places left.
        room = MAX_BANDS - len(branches) + 1
        # The heaviest that can be split; one with too many parts stays whole.
        for branch in sorted(branches, key=lambda b: -b.weight):
            parts = _parts(branch, room, light)
            if 0 < len(parts) <= room:
                k = branches.index(branch)
                branches = [*branches[:k], *parts, *branches[k + 1 :]]
                break
        else:
            return branches


def _parts(branch: _Branch, room: int, light: int) -> list[_Branch]:
    """What is heavy among the children and the place itself, where it has ops; a long row of
    numbered layers in as many pieces as there is room for."""
    children = branch.children
    rows: dict[str, list[str]] = {}
    for name in children:
        if (number := numbered(name)) is not None:
            rows.setdefault(number[0], []).append(name)
    # Only the longest row is cut into pieces: a model has one stack of layers, or one that counts.
    row = max(rows.values(), key=len, default=[])
    rest = [child for name, child in children.items() if name not in set(row)]
    if children and branch.own:
        weight = branch.weight - sum(child.weight for child in children.values())
        rest.insert(0, _Branch(branch.name, weight, set(branch.own)))
    rest = [part for part in rest if part.weight > light]
    num = room - len(rest)  # pieces that the row may take
    if 2 <= num < len(row):
        ends = [len(row) * k // num for k in range(num + 1)]
        layers = [_piece(branch, row[a:b]) for a, b in itertools.pairwise(ends)]
    else:
        layers = [children[name] for name in row]
    # The order of the model: what stands before the row stays below it in the picture.
    order = {id(child): k for k, child in enumerate(children.values())}
    first = min((order[id(children[name])] for name in row), default=0)
    ahead = [part for part in rest if order.get(id(part), -1) < first]
    behind = [part for part in rest if order.get(id(part), -1) >= first]
    return [*ahead, *(part for part in layers if part.weight > light), *behind]


def _piece(branch: _Branch, names: Sequence[str]) -> _Branch:
    children = [branch.children[name] for name in names]
    label = joined_names(names)
    path = f"{branch.name}.{label}" if branch.name else label
    modules = set().union(*(child.modules() for child in children))
    return _Branch(path, sum(child.weight for child in children), modules)


# ---- thinning, and what else a picture shows


def _thinned(account: Account) -> list[int]:
    memory = account.trace.memory
    if len(memory) <= MAX_SAMPLES:
        return list(range(len(memory)))
    num = MAX_SAMPLES // 2  # each stretch keeps two steps
    # The ends of the axis, and what the page points at.
    kept = {0, len(memory) - 1, account.trace.peak_step}
    if account.turn is not None:
        kept.add(account.turn)
    for a, b in itertools.pairwise(len(memory) * k // num for k in range(num + 1)):
        kept |= {max(range(a, b), key=memory.__getitem__), min(range(a, b), key=memory.__getitem__)}
    return sorted(kept)


def _ghost(account: Account, steps: Sequence[int]) -> tuple[int, ...]:
    """Per sample: what keep-all holds when it has done the same share of its forward, or of its
    backward; the most since the sample before, so that its peak stays."""
    memory, loss = account.base.memory, account.problem.loss_op
    # Progress counts first runs alone: a schedule that recomputes much is not further on for that.
    firsts = zip(account.schedule.steps, account.run_before, strict=True)
    done = list(itertools.accumulate(int(isinstance(s, int) and not again) for s, again in firsts))
    half = -1 if account.turn is None or loss is None else account.turn
    before_half, before_loss = (0, 0) if loss is None or half < 0 else (done[half], loss + 1)
    found, before = [], 0
    for t in steps:
        if t <= half:
            reached = done[t] * before_loss // before_half
        else:
            share = (done[t] - before_half) * (len(memory) - before_loss)
            reached = before_loss + share // max(1, done[-1] - before_half)
        # Where no first run lies between two samples, the slice is empty: the last one counts.
        found.append(max(memory[before:reached], default=memory[max(0, reached - 1)]))
        before = max(before, reached)
    return tuple(found)


def _fates(account: Account) -> tuple[list[int], list[int]]:
    """Per step: the last step that reads what it makes, and when its op runs next."""
    until = list(range(len(account.schedule)))
    for copy in account.copies:
        until[copy.first] = max(until[copy.first], copy.last)
    again = [-1] * len(until)
    # From the end: what runs next is known when a step is reached.
    following: dict[int, int] = {}
    for step in range(len(until) - 1, -1, -1):
        op_id = account.schedule.steps[step]
        if not isinstance(op_id, int):
            continue
        again[step] = following.get(op_id, -1)
        following[op_id] = step
    return until, again


def _lanes(account: Account, starts: Sequence[int]) -> list[tuple[int, int, int, int, int]]:
    """Stretches of steps in one lane; what is too close together to be seen apart is one."""
    gap = len(account.schedule) // (2 * MAX_STRETCHES)  # in steps
    begun: dict[int, tuple[int, int]] = {}  # lane -> its stretch so far
    found: list[tuple[int, int, int]] = []
    for step, op_id in enumerate(account.schedule.steps):
        if not isinstance(op_id, int):
            continue
        here = lane(account.problem.ops[op_id].phase, account.run_before[step])
        first, end = begun.get(here, (step, step))
        if step - end > gap:
            found.append((here, first, end))
            first = step
        begun[here] = first, step + 1
    found += [(here, first, end) for here, (first, end) in begun.items()]
    ops = [(k, a, b, starts[a], starts[b]) for k, a, b in sorted(found)]
    return ops + _transfer_lanes(account)


def _transfer_lanes(account: Account) -> list[tuple[int, int, int, int, int]]:
    """Each transfer, when it runs; those that follow each other at once are one stretch."""
    lanes = account.trace.lanes
    if lanes is None:
        return []
    found: list[tuple[int, int, int, int, int]] = []
    for here, kind in ((SENDING, "send"), (FETCHING, "fetch")):
        for t, step in enumerate(account.schedule.steps):
            if isinstance(step, int) or step[0] != kind:
                continue
            start, finish = lanes.start[t], lanes.finish[t]
            if found and found[-1][0] == here and found[-1][4] == start:
                start, first = found[-1][3], found[-1][1]
                found[-1] = (here, first, t + 1, start, finish)
            else:
                found.append((here, t, t + 1, start, finish))
    return found


Texts = Callable[[str], int]


def numbered_texts() -> tuple[list[str], Texts]:
    """A list that fills itself: each text once, and the position of each."""
    texts: list[str] = []
    known: dict[str, int] = {}

    def number(text: str) -> int:
        if text not in known:
            known[text] = len(texts)
            texts.append(text)
        return known[text]

    return texts, number
