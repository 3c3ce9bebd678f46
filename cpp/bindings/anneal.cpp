// Simulated annealing.
#include <nanobind/stl/array.h>
#include <nanobind/stl/function.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "anneal/anneal.h"
#include "bindings/bindings.h"
#include "core/simulate.h"

namespace rekindle {

namespace {

void bind_results(nb::module_& m) {
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
}

}  // namespace

void bind_anneal(nb::module_& m) {
    bind_results(m);

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
            // A reference: copies of the options must not touch the count of a Python object
            // without the GIL.
            if (custom)
                options.custom = [&custom](double peak, double cost) {
                    nb::gil_scoped_acquire gil;
                    return (*custom)(peak, cost);
                };
            if (starts.empty()) throw nb::value_error("anneal: no start");
            nb::gil_scoped_release release;
            for (const auto& start : starts)
                if (!simulate(problem, start).valid())
                    throw nb::value_error("anneal: a start is not a valid schedule");
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

}  // namespace rekindle
