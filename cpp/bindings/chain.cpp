// The dynamic programs over chains of blocks.
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "chain/chain_dp.h"

namespace rekindle {

namespace {

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

}  // namespace

void bind_chain(nb::module_& m) {
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
        // Look-ups in the solved table: microseconds, so they keep the GIL.
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

}  // namespace rekindle
