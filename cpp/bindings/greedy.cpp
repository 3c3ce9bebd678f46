// The greedy walk, the fill-up of TW-Remat, and the removal of runs that there is room for.
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstddef>
#include <cstdint>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "greedy/evict.h"
#include "greedy/fill_up.h"
#include "greedy/prune.h"

namespace rekindle {

void bind_greedy(nb::module_& m) {
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

}  // namespace rekindle
