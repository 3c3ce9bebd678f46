// The only file that knows Python: rekindle._native.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include "chain_dp.h"
#include "control.h"
#include "evict.h"
#include "fillup.h"
#include "problem.h"
#include "prune.h"
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

using OptionRow = std::tuple<std::int64_t, std::int64_t, std::int64_t, std::int64_t>;

std::unique_ptr<ChainTable> chain_table(std::vector<std::int64_t> inputs,
                                        std::vector<std::int64_t> standing,
                                        std::vector<std::int64_t> bare_costs,
                                        std::vector<std::int64_t> bare_peaks,
                                        std::vector<std::int64_t> pass_peaks,
                                        const std::vector<std::vector<OptionRow>>& options,
                                        std::int64_t unit, std::size_t slots, ChainRule rule,
                                        double time_limit_s) {
    const std::size_t n = inputs.size();
    if (n == 0 || unit < 1 || standing.size() != n || bare_costs.size() != n ||
        bare_peaks.size() != n || pass_peaks.size() != n || options.size() != n)
        throw std::invalid_argument("a chain needs one entry per block in each list, unit >= 1");
    Chain chain{std::move(inputs),     std::move(standing),   std::move(bare_costs),
                std::move(bare_peaks), std::move(pass_peaks), {}};
    for (const auto& rows : options) {
        auto& own = chain.options.emplace_back();
        for (const auto& [saved, forward_peak, backward_peak, cost] : rows)
            own.push_back({saved, forward_peak, backward_peak, cost});
    }
    nb::gil_scoped_release release;
    Control control;
    limit(control, time_limit_s);
    return solve_chain(chain, unit, slots, rule, control);
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

    nb::enum_<Keep>(m, "Keep")
        .value("cost_per_byte", Keep::cost_per_byte)
        .value("chain_per_byte", Keep::chain_per_byte)
        .value("chain_per_byte_time", Keep::chain_per_byte_time);

    m.def(
        "fill_up",
        [](const Problem& problem, const std::vector<Id>& sequence, std::int64_t limit_bytes,
           Keep keep, int rounds, double time_limit_s) {
            nb::gil_scoped_release release;
            Control control;
            limit(control, time_limit_s);
            return fill_up(problem, sequence, limit_bytes, keep, rounds, control);
        },
        "problem"_a, "sequence"_a, "limit"_a, "keep"_a, "rounds"_a, "time_limit_s"_a,
        "Keeps what a recomputing sequence frees while there is room, and skips runs thereby.");

    m.def(
        "drop_needless_runs",
        [](const Problem& problem, const std::vector<Id>& schedule, std::uint64_t limit_bytes,
           double time_limit_s) {
            nb::gil_scoped_release release;
            Control control;
            limit(control, time_limit_s);
            return drop_needless_runs(problem, schedule, limit_bytes, control);
        },
        "problem"_a, "schedule"_a, "limit"_a, "time_limit_s"_a,
        "The schedule without repeated runs whose older results can be kept within the limit.");

    nb::enum_<ChainRule>(m, "ChainRule")
        .value("persistent", ChainRule::persistent)
        .value("revolve", ChainRule::revolve)
        .value("floating", ChainRule::floating);
    nb::enum_<ChainRun>(m, "ChainRun", "F_none, F_ck, F_all by an option, B of that option.")
        .value("drop", ChainRun::drop)
        .value("keep", ChainRun::keep)
        .value("save", ChainRun::save)
        .value("back", ChainRun::back);
    nb::class_<ChainTable>(m, "ChainTable", "A solved chain; see solve_chain.")
        .def_ro("finished", &ChainTable::finished,
                "False where the time limit or Ctrl-C ended the work: there are no answers then.")
        .def("cost", &ChainTable::cost, "slots"_a,
             "The least cost with that many slots beside the input of block 0; inf: none.")
        .def(
            "build",
            [](const ChainTable& table, std::size_t slots) {
                std::vector<std::tuple<ChainRun, std::int32_t, std::int32_t>> steps;
                for (const ChainStep& step : table.build(slots))
                    steps.emplace_back(step.run, step.block, step.option);
                return steps;
            },
            "slots"_a, "The sequence of that cost as (run, block, option); empty where none.");
    m.def("solve_chain", &chain_table, "inputs"_a, "standing"_a, "bare_costs"_a, "bare_peaks"_a,
          "pass_peaks"_a, "options"_a, "unit"_a, "slots"_a, "rule"_a, "time_limit_s"_a,
          "Rotor and rk-Rotor: the best sequence over a chain of blocks for every number of slots "
          "of `unit` bytes from 0 to `slots`, in O(n^2 slots (n + options)). One entry per block in "
          "each list: `inputs` the bytes of the activation it reads; `standing` the gradients that "
          "are there from the end of the backward of block i + 1 to the start of that of block i; "
          "`bare_costs` its forward with nothing saved; `bare_peaks` that forward's peak where its "
          "input stays, without the input, with the output; `pass_peaks` the same where its input "
          "may go, with the input; `options` rows (saved, forward_peak, backward_peak, cost): what "
          "is kept between its forward and backward, the output included; the peaks while each "
          "runs, what is saved included, the block's input and `standing` left out; and the cost "
          "of both. Sizes are rounded up to slots, so a sequence never needs more than its slots.");
    m.def("chain_table_bytes", &chain_table_bytes, "num_blocks"_a, "slots"_a, "rule"_a,
          "The bytes that the table of solve_chain takes.");
}
