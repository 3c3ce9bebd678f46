// The lower bound from one moment.
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <tuple>
#include <utility>

#include "bindings/bindings.h"
#include "bound/bound.h"

namespace rekindle {

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
            // What an interrupted search has proven is true, but the caller asked to stop.
            if (control.was_interrupted) raise_interrupt();
            return std::tuple(bound.extra, bound.infeasible, bound.price, std::move(bound.kept));
        },
        "problem"_a, "op"_a, "budget"_a, "time_limit_s"_a, "price"_a = 0.0, "least"_a = 0.0,
        "Lower bound on the extra cost from the moment of one op: (extra, infeasible, price, "
        "kept). "
        "Raises KeyboardInterrupt.");
}

}  // namespace rekindle
