// The only file that knows Python: rekindle._native.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/function.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "anneal.h"
#include "control.h"
#include "evict.h"
#include "problem.h"
#include "simulate.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace rekindle;

namespace {

using Lists = std::vector<std::vector<Id>>;

Rows rows_of(const Lists& lists) {
    Rows rows;
    for (const auto& list : lists) rows.push(list);
    return rows;
}

// Lets Ctrl-C end a native search: the search stops and returns the best so far, and the caller
// learns from the second element that it was interrupted.
bool signalled() {
    nb::gil_scoped_acquire gil;
    if (PyErr_CheckSignals() == 0) return false;
    PyErr_Clear();
    return true;
}

void limit(Control& control, double time_limit_s) {
    control.time_limit_s = time_limit_s;
    control.interrupted = signalled;
}

}  // namespace

NB_MODULE(_native, m) {
    m.doc() = "Rekindle's native core: simulation and search over problems given as flat lists.";

    nb::class_<Problem>(m, "Problem")
        .def(
            "__init__",
            [](Problem* self, std::vector<std::int64_t> sizes, const std::vector<Id>& resident,
               std::vector<std::int64_t> costs, std::vector<std::int64_t> workspaces,
               const std::vector<bool>& once, const Lists& inputs, const Lists& outputs,
               const Lists& inplace, std::vector<Id> targets, std::vector<Id> held, Id loss) {
                new (self) Problem();
                self->resident.assign(sizes.size(), 0);
                for (Id v : resident) self->resident[static_cast<std::size_t>(v)] = 1;
                self->size = std::move(sizes);
                self->cost = std::move(costs);
                self->workspace = std::move(workspaces);
                self->once.assign(once.begin(), once.end());
                self->inputs = rows_of(inputs);
                self->outputs = rows_of(outputs);
                self->inplace = rows_of(inplace);
                self->targets = std::move(targets);
                self->held = std::move(held);
                self->loss = loss;
                self->index();
            },
            "sizes"_a, "resident"_a, "costs"_a, "workspaces"_a, "once"_a, "inputs"_a, "outputs"_a,
            "inplace"_a, "targets"_a, "held"_a, "loss"_a,
            "Resident values must be left out of inputs, targets and held; inplace rows are "
            "input, output, input, output, ...");

    nb::enum_<Fault>(m, "Fault")
        .value("none", Fault::none)
        .value("no_such_op", Fault::no_such_op)
        .value("not_produced", Fault::not_produced)
        .value("once_broken", Fault::once_broken)
        .value("output_missing", Fault::output_missing);

    nb::class_<Trace>(m, "Trace")
        .def_ro("fault", &Trace::fault)
        .def_ro("step", &Trace::step)
        .def_ro("op", &Trace::op)
        .def_ro("value", &Trace::value)
        .def_ro("times", &Trace::times)
        .def_ro("memory", &Trace::memory)
        .def_ro("peak", &Trace::peak)
        .def_ro("peak_step", &Trace::peak_step)
        .def_ro("runs", &Trace::runs);

    m.def(
        "simulate",
        [](const Problem& problem, const std::vector<Id>& schedule) {
            nb::gil_scoped_release release;
            return simulate(problem, schedule);
        },
        "problem"_a, "schedule"_a);

    m.def(
        "drop_dead_runs",
        [](const Problem& problem, const std::vector<Id>& schedule) {
            nb::gil_scoped_release release;
            return drop_dead_runs(problem, schedule);
        },
        "problem"_a, "schedule"_a);

    m.def(
        "evict",
        [](const Problem& problem, const std::vector<Id>& order, std::int64_t limit_bytes,
           std::size_t max_steps, double time_limit_s) {
            nb::gil_scoped_release release;
            Control control;
            limit(control, time_limit_s);
            Eviction result = evict(problem, order, limit_bytes, max_steps, control);
            return std::tuple(result.fits, result.schedule);
        },
        "problem"_a, "order"_a, "limit"_a, "max_steps"_a, "time_limit_s"_a,
        "Greedy rematerialization under a memory limit; (fits, schedule).");

    nb::enum_<Objective>(m, "Objective")
        .value("area", Objective::area)
        .value("product", Objective::product)
        .value("elu", Objective::elu)
        .value("peak", Objective::peak)
        .value("custom", Objective::custom);

    nb::class_<AnnealResult>(m, "AnnealResult")
        .def_ro("within", &AnnealResult::within)
        .def_ro("best", &AnnealResult::best)
        .def_ro("best_cost", &AnnealResult::best_cost)
        .def_ro("best_peak", &AnnealResult::best_peak)
        .def_ro("smallest", &AnnealResult::smallest)
        .def_ro("smallest_cost", &AnnealResult::smallest_cost)
        .def_ro("smallest_peak", &AnnealResult::smallest_peak)
        .def_ro("moves", &AnnealResult::moves)
        .def_ro("accepted", &AnnealResult::accepted)
        .def_ro("seed", &AnnealResult::seed)
        .def_ro("by_move", &AnnealResult::by_move);

    m.def(
        "anneal",
        [](const Problem& problem, const std::vector<std::vector<Id>>& starts, std::int64_t budget,
           Objective objective, const std::vector<std::uint64_t>& seeds, std::int64_t max_moves,
           double time_limit_s, int num_threads, double hot, double cold, double soft, double soft_weight, double smooth,
           bool reorder_only, bool ratchet, bool paper_moves, std::int64_t enough,
           std::optional<std::function<double(double, double)>> custom) {
            AnnealOptions options;
            options.budget = budget;
            options.objective = objective;
            options.max_moves = max_moves;
            options.hot = hot;
            options.cold = cold;
            options.soft = soft;
            options.soft_weight = soft_weight;
            options.smooth = smooth;
            options.reorder_only = reorder_only;
            options.ratchet = ratchet;
            options.paper_moves = paper_moves;
            options.enough = enough;
            if (custom)
                options.custom = [&custom](double peak, double cost) {
                    nb::gil_scoped_acquire gil;
                    return (*custom)(peak, cost);
                };
            nb::gil_scoped_release release;
            Control control;
            limit(control, time_limit_s);
            auto results =
                anneal_seeds(problem, starts, options, seeds, custom ? 1 : num_threads, control);
            const bool timed_out = control.elapsed_s() > time_limit_s;
            const char* ended = !control.stop ? "" : timed_out ? "time limit" : "interrupt";
            return std::tuple(std::move(results), std::string(ended));
        },
        "problem"_a, "starts"_a, "budget"_a, "objective"_a, "seeds"_a, "max_moves"_a,
        "time_limit_s"_a, "num_threads"_a = 1, "hot"_a = 50.0, "cold"_a = 0.02, "soft"_a = 0.97, "soft_weight"_a = 0.1, "smooth"_a = 0.0,
        "reorder_only"_a = false, "ratchet"_a = false, "paper_moves"_a = false, "enough"_a = -1,
        "custom"_a = nb::none(),
        "Simulated annealing, one run per seed, from valid schedules; (results, what ended it "
        "early or \"\").");

    m.def(
        "check_moves",
        [](const Problem& problem, const std::vector<Id>& start, std::int64_t budget,
           std::uint64_t seed, std::int64_t num_moves) {
            nb::gil_scoped_release release;
            return check_moves(problem, start, budget, seed, num_moves);
        },
        "problem"_a, "start"_a, "budget"_a, "seed"_a, "num_moves"_a,
        "Random moves, each compared with a full simulation; moves made, or -1 at a difference.");
}
