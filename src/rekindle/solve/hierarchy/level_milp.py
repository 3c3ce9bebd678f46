"""H-ILP: the cheapest way to run one level of a hierarchy, by mixed-integer programming.

HiRemate (Gusak et al., ICML 2025), Sec. 3.2.2 and Appendix B. A level is a row of layers; layer j
has a forward F_j and a backward B_j, each a whole part of the graph that runs by one of several
options. Order of the nodes: F_0 .. F_n, the loss, B_n .. B_0. Phases (Sec. B.2): in phase 0 each
F_j runs once and the loss; phase p ends with the backward of its layer, before which any F_k may
run again. What B.3 leaves to constraints is in the structure here: backward nodes run once, so
gradients live for a known time, and a phantom is made once (its layer's saving run) and lives to
its backward, so that the phantom variables Sp are sums of X. Variables and constraints:

- X[p, k, o], binary: F_k runs in phase p and saves by option o; exactly once in all phases up to
  its backward's (Eqs. 5 to 9). Y[p, k], binary: F_k runs bare and saves nothing (the option without
  which B.3 never runs F_j again before B_j). CR = sum of X + Y.             `_add_forward_runs`
- Z[k, o], binary: B_k runs by option o; where o saves something, Z = sum of X over the phases.
                                                                             `_add_backward_choice`
- Data (P, C, D of B.3), in the disaggregated form: K in [0, 1], kept from one event (a run that
  makes or reads the value) to the next. K before a run that reads it >= CR (for a backward: the Z
  of the options that read it, B.1.2); after a making run K <= K before + CR; after a reading one
  K <= K before. The drop of K at a run is B.3's D, so no product of hazards is needed.
                                                                   `Ledger.read`, `Ledger.make`
- Memory at each sub-step of each run of each option (Eq. 10 with the correction terms): what others
  keep, inputs not needed after the sub-step as they are after the run, outputs from where they are
  made, what is inside by the option. `corrections` off: every input stays, every output is there
  from the start.                                                            `_forward`, `_backward`
- M_save: what is kept across the loss, at a level below the top.            `_loss`

Objective: sum of cost over X, Y and Z. Scaled: bytes by the budget, cost by the mean.

Known limits: no forward is run again before the loss, so a budget that the forward alone exceeds is
infeasible here (other option makers and solvers cover it). A re-run of F_k is counted with all its
outputs; those that nothing reads fall away when the runs are lowered to ops.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from rekindle.solve.backends.mip import INF, Floats, Model, Outcome, solve_mip
from rekindle.solve.hierarchy.hierarchy_level import (
    Child,
    Interface,
    Level,
    Plan,
    interface,
    runs_once,
)
from rekindle.solve.hierarchy.memory_ledger import ONE, Ledger, Row, add_to
from rekindle.solve.hierarchy.options import SubStep


@dataclass(slots=True)
class LevelModel:
    """The program of a level. It is built once, for budgets from `least` on, and solved for any of
    them: budgets are right-hand sides only."""

    level: Level
    least: int  # no budget below this will be asked for
    corrections: bool = True
    model: Model = field(default_factory=Model, init=False)
    _ledger: Ledger = field(init=False)
    _layers: list[Interface] = field(init=False)
    _x: dict[tuple[int, int, int], int] = field(default_factory=dict, init=False)
    _y: dict[tuple[int, int], int] = field(default_factory=dict, init=False)
    _z: dict[tuple[int, int], int] = field(default_factory=dict, init=False)
    _allowed: list[set[int]] = field(default_factory=list, init=False)  # per phase: layers
    _scale: float = field(default=1.0, init=False)
    stopped: bool = field(default=False, init=False)  # whether a limit ended the last solve

    def __post_init__(self) -> None:
        self._ledger = Ledger(self.level, self.least, self.model)
        self._layers = [interface(child, self.level) for child in self.level.children]
        # Near 1, as HiGHS's tolerances are absolute.
        costs = [o.cost for child in self.level.children for o in child.options]
        self._scale = max(1.0, sum(costs) / max(1, len(costs)))
        self._find_allowed()
        self._add_columns()
        self._walk()

    @property
    def num_layers(self) -> int:
        return len(self._layers)

    def phase_of(self, layer: int) -> int:
        return self.num_layers - layer

    # -- which forwards may run in which phase

    def _find_allowed(self) -> None:
        """In the phase of B_j: the forwards on which some backward from there on depends."""
        maker = {v: j for j, layer in enumerate(self._layers) for v in layer.makes}
        # From the first layer on: in the phase of B_j only backwards of layers up to j are still to
        # come, and what they depend on grows with j.
        useful: set[int] = set()
        per_layer: list[set[int]] = []
        for j, layer in enumerate(self._layers):
            wanted = {maker[v] for reads in layer.backward_reads for v in reads if v in maker}
            if any(o.saved for o in self.level.children[j].options):
                wanted.add(j)
            stack = [k for k in wanted if k not in useful]
            while stack:
                k = stack.pop()
                if k in useful:
                    continue
                useful.add(k)
                stack.extend(maker[v] for v in self._layers[k].reads if v in maker)
            per_layer.append(set(useful))
        # Phase 0 runs all forwards, in order; phase p belongs to B of layer num_layers - p.
        whole = set(range(self.num_layers))
        self._allowed = [whole, *(per_layer[j] for j in reversed(range(self.num_layers)))]

    def _runs(self, phase: int) -> list[int]:
        """The layers whose forward may run in this phase; those with ops that run once only in
        phase 0."""
        return [
            k
            for k in sorted(self._allowed[phase])
            if phase == 0 or not runs_once(self.level.children[k])
        ]

    # -- columns

    def _add_columns(self) -> None:
        for phase in range(self.num_layers + 1):
            for k in self._runs(phase):
                self._add_forward_runs(phase, k)
        for k in range(self.num_layers):
            self._add_backward_choice(k)

    def _add_forward_runs(self, phase: int, k: int) -> None:
        child = self.level.children[k]
        run: Row = {}
        # After its backward a layer has nothing to save.
        if phase <= self.phase_of(k):
            for o, option in enumerate(child.options):
                if option.saved:
                    cost = option.forward_cost / self._scale
                    column = self.model.add_column(cost, integer=True)
                    self._x[phase, k, o] = column
                    run[column] = 1.0
        cost = child.bare.forward_cost / self._scale
        column = self.model.add_column(cost, integer=True)
        self._y[phase, k] = column
        run[column] = 1.0
        # In phase 0 exactly one way; later at most one.
        if len(run) > 1 or phase == 0:
            self._ledger.row(1.0 if phase == 0 else -INF, run, 1.0)

    def _add_backward_choice(self, k: int) -> None:
        options = self.level.children[k].options
        # Z is tied to X where the option saves something; options that save nothing need no tie.
        choice: Row = {}
        for o, option in enumerate(options):
            column = self.model.add_column(option.backward_cost / self._scale, integer=True)
            self._z[k, o] = column
            choice[column] = 1.0
            if option.saved:
                row: Row = {column: -1.0}
                for phase in range(self.phase_of(k) + 1):
                    if (phase, k, o) in self._x:
                        row[self._x[phase, k, o]] = 1.0
                self._ledger.row(0.0, row, 0.0)
        self._ledger.row(1.0, choice, 1.0)

    def _run(self, phase: int, k: int) -> Row:
        """CR: whether F_k runs in the phase."""
        if phase == 0:
            return {ONE: 1.0}
        # CR = sum of X + Y, at most 1 by the row of `_add_forward_runs`.
        row = {self._y[phase, k]: 1.0}
        for o in range(len(self.level.children[k].options)):
            if (phase, k, o) in self._x:
                row[self._x[phase, k, o]] = 1.0
        return row

    # -- rows, step by step

    def _walk(self) -> None:
        # First pass: the last event of each value, so that the second one knows where its K ends.
        steps: list[tuple[int, int, bool]] = [(0, k, False) for k in range(self.num_layers)]
        steps.append((0, -1, False))
        for phase in range(1, self.num_layers + 1):
            steps += [(phase, k, False) for k in self._runs(phase)]
            steps.append((phase, self.num_layers - phase, True))
        for s, (_, k, is_backward) in enumerate(steps):
            if k < 0:
                touched: Iterable[int] = self.level.loss_reads
            elif is_backward:
                touched = (v for reads in self._layers[k].backward_reads for v in reads)
            else:
                touched = (*self._layers[k].makes, *self._layers[k].reads)
            self._ledger.last_event.update(dict.fromkeys(touched, s))
        grads = self._gradients()
        for s, (phase, k, is_backward) in enumerate(steps):
            self._ledger.now = s
            if k < 0:
                self._loss(grads)
            elif is_backward:
                self._backward(phase, k, grads)
            else:
                self._forward(phase, k, grads)

    def _gradients(self) -> dict[int, int]:
        """Per gradient: the last layer whose backward reads it; -1: to the end."""
        last: dict[int, int] = {}
        for k, layer in enumerate(self._layers):
            for v in layer.grads_in:
                last[v] = min(last.get(v, k), k)
        for v in self.level.final:
            last[v] = -1
        return last

    def _forward(self, phase: int, k: int, grads: dict[int, int]) -> None:
        child, layer = self.level.children[k], self._layers[k]
        ledger = self._ledger
        run = self._run(phase, k)
        before = {v: ledger.kept.get(v, {}) for v in (*layer.reads, *layer.makes)}
        fresh = {v: ledger.make(v, run, len(layer.makes) == 1) for v in layer.makes}
        for v in layer.reads:
            ledger.read(v, run)
        # The part of the row that is the same for all options and sub-steps of this run.
        others = ledger.others((*layer.reads, *layer.makes))
        for o in (-1, *range(len(child.options))):
            column = self._y.get((phase, k)) if o < 0 else self._x.get((phase, k, o))
            if column is None:
                continue
            option = child.bare if o < 0 else child.options[o]
            for step in self._sub_steps(option.forward_steps, child):
                row = dict(others)
                add_to(row, {column: float(step.inside)})
                for v in layer.reads:
                    add_to(row, ledger.kept[v] if v in step.gone else before[v], ledger.size(v))
                for v in layer.makes:
                    add_to(row, fresh[v] if v in step.made else before[v], ledger.size(v))
                ledger.budget(row)
        for o, option in enumerate(child.options):
            if (phase, k, o) in self._x:
                phantom = ledger.phantoms.setdefault(k, {})
                phantom[self._x[phase, k, o]] = float(option.saved)

    def _sub_steps(self, steps: Sequence[SubStep], child: Child) -> list[SubStep]:
        """In global value ids; merged into one where corrections are off."""
        ids = child.part.values
        # Below the top a level is solved for several budgets, and the merged rows make programs
        # that are much smaller; what they count too much is found when the option is measured.
        if not self.corrections:
            made = {ids[v] for step in steps for v in step.made}
            inside = max((step.inside for step in steps), default=0)
            return [SubStep(inside, frozenset(), frozenset(made))]
        return [
            SubStep(
                step.inside,
                frozenset(ids[v] for v in step.gone),
                frozenset(ids[v] for v in step.made),
            )
            for step in steps
        ]

    def _loss(self, grads: dict[int, int]) -> None:
        level, ledger = self.level, self._ledger
        reads = [v for v in level.loss_reads if v in level.size]
        before = {v: ledger.kept[v] for v in reads}
        for v in reads:
            ledger.read(v, {ONE: 1.0})
        others = ledger.others(reads)
        made = sum(level.size.get(v, 0) for v in level.loss_makes)
        row = dict(others)
        for v in reads:
            add_to(row, before[v], ledger.size(v))
        add_to(row, {ONE: float(made + level.loss_workspace)})
        ledger.budget(row)
        # From here on the caller has it: no constraint has to keep it, and no drop is possible.
        for v in level.held:
            ledger.kept[v] = {ONE: 1.0}
        row = dict(others)
        for v in reads:
            add_to(row, ledger.kept[v], ledger.size(v))
        ledger.budget(row, is_save=True)
        ledger.alive.update({v: level.size.get(v, 0) for v in level.loss_makes})
        self._retire(self.num_layers, grads)

    def _retire(self, reached: int, grads: dict[int, int]) -> None:
        """Drops the gradients that no backward below `reached` reads."""
        for v in [v for v in self._ledger.alive if grads.get(v, self.num_layers) >= reached]:
            del self._ledger.alive[v]

    def _backward(self, phase: int, k: int, grads: dict[int, int]) -> None:
        child, layer = self.level.children[k], self._layers[k]
        ledger = self._ledger
        reads = sorted({v for reads in layer.backward_reads for v in reads})
        before = {v: ledger.kept.get(v, {}) for v in reads}
        for v in reads:
            row: Row = {
                self._z[k, o]: 1.0
                for o in range(len(child.options))
                if v in layer.backward_reads[o]
            }
            ledger.read(v, {ONE: 1.0} if len(row) == len(child.options) else row)
        # From here on what was saved is counted inside the option's own sub-steps.
        ledger.phantoms.pop(k, None)
        others = ledger.others(reads)
        for o, option in enumerate(child.options):
            for step in self._sub_steps(option.backward_steps, child):
                row = dict(others)
                # Where another option runs, its own phantom is there; this row is then no tighter
                # than that option's, since its inside is never below what it saved at its start.
                add_to(row, {self._z[k, o]: float(step.inside)})
                for v in reads:
                    in_use = v in layer.backward_reads[o] and v not in step.gone
                    add_to(row, before[v] if in_use else ledger.kept[v], ledger.size(v))
                # Gradients have no K: each backward runs once, so it is known when they come and
                # go.
                gone = sum(ledger.alive.get(v, 0) for v in step.gone if grads.get(v, k) >= k)
                made = sum(ledger.size(v) for v in step.made)
                add_to(row, {ONE: float(made - gone)})
                ledger.budget(row)
        ledger.alive.update({v: self.level.size[v] for v in layer.grads_out})
        self._retire(k, grads)

    # -- answers

    def solve(
        self,
        peak_budget: int,
        save_budget: int | None = None,
        *,
        time_limit_s: float,
        rel_gap: float = 0.005,
        seed: int = 0,
        start: Plan | None = None,
        threads: int = 0,
    ) -> tuple[Plan | None, bool]:
        """The best plan found, and whether it is proven that there is none."""
        self._ledger.set_budgets(peak_budget, save_budget)
        answer = solve_mip(
            self.model,
            time_limit_s=time_limit_s,
            rel_gap=rel_gap,
            seed=seed,
            start=self._columns_of(start) if start is not None else None,
            threads=threads,
            backend="highs",
        )
        # Noted for callers that say whether more time would have helped.
        self.stopped = answer.outcome is Outcome.STOPPED
        if answer.interrupted:
            raise KeyboardInterrupt
        if answer.x is None:
            return None, answer.outcome is Outcome.INFEASIBLE
        return self._plan(answer.x, answer.objective * self._scale), False

    def _plan(self, x: Floats, cost: float) -> Plan:
        def option_of(phase: int, k: int) -> int | None:
            for o in range(len(self.level.children[k].options)):
                column = self._x.get((phase, k, o))
                if column is not None and x[column] > 0.5:
                    return o
            return -1 if x[self._y[phase, k]] > 0.5 else None

        forward = []
        for k in range(self.num_layers):
            option = option_of(0, k)
            assert option is not None
            forward.append((k, option))
        backward: list[tuple[int, int, bool]] = []
        for phase in range(1, self.num_layers + 1):
            for k in self._runs(phase):
                option = option_of(phase, k)
                if option is not None:
                    backward.append((k, option, False))
            j = self.num_layers - phase
            chosen = max(range(len(self.level.children[j].options)), key=lambda o: x[self._z[j, o]])
            backward.append((j, chosen, True))
        return Plan(tuple(forward), tuple(backward), cost)

    def _columns_of(self, plan: Plan) -> dict[int, float]:
        """The plan as values of the binary columns; the solver completes the rest."""
        # All binaries are named, so HiGHS is left with an LP for the K.
        values = dict.fromkeys((*self._x.values(), *self._y.values(), *self._z.values()), 0.0)
        for k, o in plan.forward:
            values[self._y[0, k] if o < 0 else self._x[0, k, o]] = 1.0
        phase = 1
        for k, o, is_backward in plan.backward:
            if is_backward:
                values[self._z[k, o]] = 1.0
                phase += 1
            elif o < 0:
                values[self._y[phase, k]] = 1.0
            else:
                values[self._x[phase, k, o]] = 1.0
        return values
