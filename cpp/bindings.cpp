// The only file that knows Python: rekindle._native.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/function.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <span>
#include <tuple>
#include <vector>

#include "anneal/anneal.h"
#include "bound/bound.h"
#include "chain/chain_dp.h"
#include "core/control.h"
#include "core/problem.h"
#include "core/simulate.h"
#include "greedy/evict.h"
#include "greedy/fill_up.h"
#include "greedy/prune.h"
#include "search/exact.h"
#include "search/lns.h"
#include "search/order.h"
#include "search/policies.h"
#include "search/save_sets.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace rekindle;

namespace {

// Rows as Python gives them: all ids one after the other, and where each row ends.
using FlatRows = std::tuple<std::vector<Id>, std::vector<std::size_t>>;

void check_ids(std::span<const Id> ids, std::size_t count) {
    for (Id v : ids)
        if (v < 0 || static_cast<std::size_t>(v) >= count)
            throw nb::index_error("a value id is out of range");
}

std::vector<Id> without(std::span<const Id> ids, const std::vector<std::uint8_t>& resident) {
    check_ids(ids, resident.size());
    std::vector<Id> kept;
    for (Id v : ids)
        if (!resident[static_cast<std::size_t>(v)]) kept.push_back(v);
    return kept;
}

Rows rows_of(const FlatRows& flat, std::size_t num_ops, const std::vector<std::uint8_t>& resident) {
    const auto& [ids, ends] = flat;
    check_ids(ids, resident.size());
    if (ends.size() != num_ops) throw nb::value_error("there must be one row for each op");
    Rows rows;
    rows.ids.reserve(ids.size());
    rows.start.reserve(ends.size() + 1);
    std::size_t k = 0;
    for (std::size_t end : ends) {
        if (end > ids.size()) throw nb::value_error("a row ends beyond the ids");
        for (; k < end; ++k)
            if (!resident[static_cast<std::size_t>(ids[k])]) rows.ids.push_back(ids[k]);
        rows.start.push_back(rows.ids.size());
    }
    return rows;
}

// Lets Ctrl-C end a native search. The signal is taken here (the exception is cleared), so that a
// search can return its best so far; the binding then tells its caller of `was_interrupted`.
bool signalled() {
    nb::gil_scoped_acquire gil;
    if (PyErr_CheckSignals() == 0) return false;
    PyErr_Clear();
    return true;
}

[[noreturn]] void raise_interrupt() {
    PyErr_SetNone(PyExc_KeyboardInterrupt);
    throw nb::python_error();
}

void limit(Control& control, double time_limit_s) {
    control.time_limit_s = time_limit_s;
    control.interrupted = signalled;
}

const char* ended_by(const Control& control) {
    return control.was_interrupted ? "interrupt" : control.stop ? "time limit" : "";
}

void bind_problem(nb::module_& m) {
    nb::class_<Problem>(m, "Problem")
        .def(
            "__init__",
            [](Problem* self, std::vector<std::int64_t> sizes, const std::vector<Id>& resident,
               std::vector<std::int64_t> costs, std::vector<std::int64_t> workspaces,
               const std::vector<bool>& once, const FlatRows& inputs, const FlatRows& outputs,
               const FlatRows& inplace, const std::vector<Id>& targets, const std::vector<Id>& held,
               Id loss) {
                // Built apart and moved in: nothing half-made stays behind an exception.
                Problem p;
                const std::size_t num_ops = costs.size();
                if (workspaces.size() != num_ops || once.size() != num_ops)
                    throw nb::value_error("costs, workspaces and once must be of one length");
                p.resident.assign(sizes.size(), 0);
                check_ids(resident, sizes.size());
                for (Id v : resident) p.resident[static_cast<std::size_t>(v)] = 1;
                p.size = std::move(sizes);
                p.cost = std::move(costs);
                p.workspace = std::move(workspaces);
                p.once.assign(once.begin(), once.end());
                p.inputs = rows_of(inputs, num_ops, p.resident);
                p.outputs = rows_of(outputs, num_ops, p.resident);
                p.inplace = rows_of(inplace, num_ops, p.resident);
                if (p.inplace.ids.size() != std::get<0>(inplace).size())
                    throw nb::value_error("a resident value stands in an inplace pair");
                for (Id i = 0; i < p.num_ops(); ++i)
                    if (p.inplace[i].size() % 2 != 0)
                        throw nb::value_error("an inplace row is not made of pairs");
                p.targets = without(targets, p.resident);
                p.held = without(held, p.resident);
                p.loss = loss;
                p.index();
                new (self) Problem(std::move(p));
            },
            "sizes"_a, "resident"_a, "costs"_a, "workspaces"_a, "once"_a, "inputs"_a, "outputs"_a,
            "inplace"_a, "targets"_a, "held"_a, "loss"_a,
            "Rows are (all ids, where each row ends); inplace rows are input, output, input, "
            "output, ... Resident values are left out of inputs, targets and held.");
}

void bind_simulation(nb::module_& m) {
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
        .def_ro("runs", &Trace::runs)
        .def_prop_ro("copies", [](const Trace& trace) {
            std::vector<std::tuple<Id, std::size_t, std::size_t>> rows;
            rows.reserve(trace.copies.size());
            for (const Copy& c : trace.copies) rows.emplace_back(c.value, c.first, c.last);
            return rows;
        });

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
}

void bind_walks(nb::module_& m) {
    m.def(
        "evict",
        [](const Problem& problem, const std::vector<Id>& order, std::int64_t limit_bytes,
           std::size_t max_steps, double time_limit_s) {
            Control control;
            limit(control, time_limit_s);
            Eviction result;
            {
                nb::gil_scoped_release release;
                result = evict(problem, order, limit_bytes, max_steps, control);
            }
            // Half a walk is worth nothing: the interrupt goes on.
            if (control.was_interrupted) raise_interrupt();
            return std::tuple(result.fits, std::move(result.schedule));
        },
        "problem"_a, "order"_a, "limit"_a, "max_steps"_a, "time_limit_s"_a,
        "Greedy rematerialization under a memory limit; (fits, schedule). Raises "
        "KeyboardInterrupt.");

    m.def(
        "smallest_order",
        [](const Problem& problem, const std::vector<Id>& start, std::int64_t budget,
           std::size_t max_width, std::int64_t max_sets, double time_limit_s) {
            const Trace trace = simulate(problem, start);
            if (!trace.valid() || std::ranges::any_of(trace.runs, [](auto n) { return n != 1; }))
                throw nb::value_error("smallest_order: the start must run every op once");
            Control control;
            limit(control, time_limit_s);
            OrderResult found;
            {
                nb::gil_scoped_release release;
                found = smallest_order(problem, start, {budget, max_width, max_sets}, control);
            }
            const bool interrupted = control.was_interrupted;
            return std::tuple(std::move(found.order), found.at_least, found.sets, interrupted);
        },
        "problem"_a, "start"_a, "budget"_a, "max_width"_a, "max_sets"_a, "time_limit_s"_a,
        "The order with the smallest peak found, every op once; (order, proven smallest peak, sets "
        "of ops looked at, interrupted).");

    m.def(
        "search_policy",
        [](const Problem& problem, std::vector<Id> order, std::vector<Id> classes,
           std::vector<double> weights, std::int64_t budget,
           const std::vector<std::uint64_t>& seeds, std::int64_t max_walks, double time_limit_s,
           int num_threads) {
            Control control;
            limit(control, time_limit_s);
            PolicyResult found;
            {
                nb::gil_scoped_release release;
                found = search_policies(
                    problem,
                    {std::move(order), std::move(classes), std::move(weights), budget, max_walks},
                    seeds, num_threads, control);
            }
            return std::tuple(std::move(found.schedule), found.walks, ended_by(control));
        },
        "problem"_a, "order"_a, "classes"_a, "weights"_a, "budget"_a, "seeds"_a, "max_walks"_a,
        "time_limit_s"_a, "num_threads"_a = 1,
        "Climb over eviction policies, one climb per seed; (cheapest schedule within the budget or "
        "[], walks made, what ended it early or \"\").");
}

void bind_bound(nb::module_& m) {
    m.def(
        "bound_at",
        [](const Problem& problem, Id op, std::int64_t budget, double time_limit_s, double price,
           double least) {
            Control control;
            limit(control, time_limit_s);
            Bound bound;
            {
                nb::gil_scoped_release release;
                bound = bound_at(problem, op, budget, control, price, least);
            }
            if (control.was_interrupted) raise_interrupt();
            return std::tuple(bound.extra, bound.infeasible, bound.price, std::move(bound.kept));
        },
        "problem"_a, "op"_a, "budget"_a, "time_limit_s"_a, "price"_a = 0.0, "least"_a = 0.0,
        "Lower bound on the extra cost from the moment of one op: (extra, infeasible, price, "
        "kept). "
        "Raises KeyboardInterrupt.");
}

// What searches have found, one per seed: the schedules, all tries, what ended them early or "".
template <typename Found>
auto gathered(std::vector<Found> found, const Control& control) {
    std::vector<std::vector<Id>> schedules;
    std::int64_t tries = 0;
    for (Found& one : found) {
        tries += one.tries;
        if (!one.schedule.empty()) schedules.push_back(std::move(one.schedule));
    }
    return std::tuple(std::move(schedules), tries, ended_by(control));
}

void bind_climbs(nb::module_& m) {
    m.def(
        "large_neighbourhood_search",
        [](const Problem& problem, const std::vector<std::vector<Id>>& starts, std::int64_t budget,
           const std::vector<std::uint64_t>& seeds, std::int64_t max_tries, double time_limit_s,
           int num_threads, double hot) {
            if (starts.empty()) throw nb::value_error("a start is needed");
            for (const auto& start : starts) {
                const Trace trace = simulate(problem, start);
                if (!trace.valid() || budget < 0 || trace.peak > static_cast<std::uint64_t>(budget))
                    throw nb::value_error("starts must be valid and within the budget");
            }
            Control control;
            limit(control, time_limit_s);
            std::vector<LnsResult> found;
            {
                nb::gil_scoped_release release;
                const LnsOptions options{budget, max_tries, hot};
                found = large_neighbourhood_search(problem, starts, options, seeds, num_threads,
                                                   control);
            }
            return gathered(std::move(found), control);
        },
        "problem"_a, "starts"_a, "budget"_a, "seeds"_a, "max_tries"_a, "time_limit_s"_a,
        "num_threads"_a = 1, "hot"_a = 0.0,
        "Large-neighbourhood search from schedules within the budget, one search per seed; (the "
        "best of each, tries made, what ended it early or \"\").");

    m.def(
        "search_save_sets",
        [](const Problem& problem, std::vector<Id> order, Id moment, std::vector<Id> classes,
           std::int64_t budget, const std::vector<std::uint64_t>& seeds, std::int64_t max_tries,
           double time_limit_s, int num_threads) {
            Control control;
            limit(control, time_limit_s);
            const auto num_ops = static_cast<std::size_t>(problem.num_ops());
            if (moment < 0 || static_cast<std::size_t>(moment) >= num_ops ||
                order.size() != num_ops)
                throw nb::value_error("an order of all ops and one of them are needed");
            std::vector<SaveSetResult> found;
            {
                nb::gil_scoped_release release;
                found = search_save_sets(
                    problem, {std::move(order), moment, std::move(classes), budget, max_tries},
                    seeds, num_threads, control);
            }
            return gathered(std::move(found), control);
        },
        "problem"_a, "order"_a, "moment"_a, "classes"_a, "budget"_a, "seeds"_a, "max_tries"_a,
        "time_limit_s"_a, "num_threads"_a = 1,
        "Climb over what is kept across the first run of the op `moment`, one climb per seed; (the "
        "best schedule of each that found one, tries made, what ended it early or \"\").");
}

void bind_exact(nb::module_& m) {
    m.def("exact_bits", &exact_bits, "problem"_a);
    m.def(
        "solve_exact",
        [](const Problem& problem, std::int64_t budget, double time_limit_s, std::int64_t below,
           std::size_t max_states) {
            Control control;
            limit(control, time_limit_s);
            ExactResult answer;
            {
                nb::gil_scoped_release release;
                answer = solve_exact(problem, budget, {below, max_states}, control);
            }
            if (control.was_interrupted) raise_interrupt();
            return std::tuple(answer.finished, answer.feasible, std::move(answer.schedule));
        },
        "problem"_a, "budget"_a, "time_limit_s"_a, "below"_a = -1, "max_states"_a = 1'000'000,
        "The optimum over all schedules of a small problem, of those that cost less than `below` "
        "where that is not -1: (finished, feasible, schedule). Raises KeyboardInterrupt.");
}

void bind_annealing(nb::module_& m) {
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
        .def_ro("judged", &AnnealResult::judged)
        .def_ro("accepted", &AnnealResult::accepted)
        .def_ro("seed", &AnnealResult::seed)
        .def_ro("by_move", &AnnealResult::by_move);

    m.def(
        "anneal",
        [](const Problem& problem, const std::vector<std::vector<Id>>& starts, std::int64_t budget,
           Objective objective, const std::vector<std::uint64_t>& seeds, std::int64_t max_moves,
           double time_limit_s, int num_threads, double hot, double cold, double soft,
           double soft_weight, double smooth, bool reorder_only, bool ratchet, bool paper_moves,
           bool windows, std::int64_t enough,
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
            options.windows = windows;
            options.enough = enough;
            if (custom)
                options.custom = [&custom](double peak, double cost) {
                    nb::gil_scoped_acquire gil;
                    return (*custom)(peak, cost);
                };
            for (const auto& start : starts)
                if (!simulate(problem, start).valid())
                    throw nb::value_error("anneal: a start is not a valid schedule");
            if (starts.empty()) throw nb::value_error("anneal: no start");
            nb::gil_scoped_release release;
            Control control;
            limit(control, time_limit_s);
            auto results =
                anneal_seeds(problem, starts, options, seeds, custom ? 1 : num_threads, control);
            bool cut = false;
            for (const AnnealResult& r : results)
                cut = cut || (r.moves < max_moves && !(r.within && r.best_cost <= enough));
            const bool interrupted = control.stop && control.elapsed_s() <= time_limit_s;
            const char* ended = interrupted ? "interrupt" : cut ? "time limit" : "";
            return std::tuple(std::move(results), std::string(ended));
        },
        "problem"_a, "starts"_a, "budget"_a, "objective"_a, "seeds"_a, "max_moves"_a,
        "time_limit_s"_a, "num_threads"_a = 1, "hot"_a = 50.0, "cold"_a = 0.02, "soft"_a = 0.97,
        "soft_weight"_a = 0.1, "smooth"_a = 0.0, "reorder_only"_a = false, "ratchet"_a = false,
        "paper_moves"_a = false, "windows"_a = false, "enough"_a = -1, "custom"_a = nb::none(),
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

void bind_filling(nb::module_& m) {
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
}

using OptionRow = std::tuple<std::int64_t, std::int64_t, std::int64_t, std::int64_t>;

std::unique_ptr<ChainTable> chain_table(
    std::vector<std::int64_t> inputs, std::vector<std::int64_t> standing,
    std::vector<std::int64_t> bare_costs, std::vector<std::int64_t> bare_peaks,
    std::vector<std::int64_t> pass_peaks, const std::vector<std::vector<OptionRow>>& options,
    std::int64_t unit, std::size_t slots, ChainRule rule, double time_limit_s) {
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

void bind_chains(nb::module_& m) {
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
    m.def(
        "solve_chain", &chain_table, "inputs"_a, "standing"_a, "bare_costs"_a, "bare_peaks"_a,
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

}  // namespace

NB_MODULE(_native, m) {
    // A problem that lives until the interpreter ends (a global) is no leak worth a warning.
    nb::set_leak_warnings(false);
    m.doc() = "Rekindle's native core: simulation and search over problems given as flat lists.";

    bind_problem(m);
    bind_simulation(m);
    bind_walks(m);
    bind_bound(m);
    bind_climbs(m);
    bind_exact(m);
    bind_annealing(m);
    bind_filling(m);
    bind_chains(m);
}
