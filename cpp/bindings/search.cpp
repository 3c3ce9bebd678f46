// The searches: exact, over orders, over eviction policies, over save sets, and large
// neighbourhoods.
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "core/simulate.h"
#include "search/exact.h"
#include "search/lns.h"
#include "search/order.h"
#include "search/policies.h"
#include "search/save_sets.h"

namespace rekindle {

namespace {

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

void bind_order(nb::module_& m) {
    m.def(
        "smallest_order",
        [](const Problem& problem, const std::vector<Id>& start, std::int64_t budget,
           std::size_t max_width, std::int64_t max_sets, double time_limit_s) {
            Control control;
            limit(control, time_limit_s);
            OrderResult found;
            {
                nb::gil_scoped_release release;
                const Trace trace = simulate(problem, start);
                if (!trace.valid() ||
                    std::ranges::any_of(trace.runs, [](auto runs) { return runs != 1; }))
                    throw nb::value_error("smallest_order: the start must run every op once");
                found = smallest_order(problem, start, {budget, max_width, max_sets}, control);
            }
            const bool interrupted = control.was_interrupted;
            return std::tuple(std::move(found.order), found.at_least, found.sets, interrupted);
        },
        "problem"_a, "start"_a, "budget"_a, "max_width"_a, "max_sets"_a, "time_limit_s"_a,
        "The order with the smallest peak found, every op once; (order, proven smallest peak, sets "
        "of ops looked at, interrupted).");
}

void bind_policies(nb::module_& m) {
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

void bind_climbs(nb::module_& m) {
    m.def(
        "large_neighbourhood_search",
        [](const Problem& problem, const std::vector<std::vector<Id>>& starts, std::int64_t budget,
           const std::vector<std::uint64_t>& seeds, std::int64_t max_tries, double time_limit_s,
           int num_threads, double hot) {
            if (starts.empty()) throw nb::value_error("a start is needed");
            Control control;
            limit(control, time_limit_s);
            std::vector<LnsResult> found;
            {
                nb::gil_scoped_release release;
                for (const auto& start : starts) {
                    const Trace trace = simulate(problem, start);
                    if (!trace.valid() || budget < 0 ||
                        trace.peak > static_cast<std::uint64_t>(budget))
                        throw nb::value_error("starts must be valid and within the budget");
                }
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
    // Counts bits; the GIL stays.
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

}  // namespace

void bind_search(nb::module_& m) {
    bind_exact(m);
    bind_order(m);
    bind_policies(m);
    bind_climbs(m);
}

}  // namespace rekindle
