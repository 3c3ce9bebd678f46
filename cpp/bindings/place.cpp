// The placement of blocks: the caching allocator as a model, and offsets in one range.
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <limits>
#include <stdexcept>
#include <tuple>
#include <vector>

#include "bindings/bindings.h"
#include "place/caching_pool.h"
#include "place/place.h"

namespace rekindle {

namespace {

void check_events(const PoolEvents& events) {
    if (!are_valid(events))
        throw std::invalid_argument("an event gives back what is not there, or is 0");
}

constexpr std::int64_t most_bytes = std::int64_t{1} << 62;

using IntervalRow = std::tuple<std::int64_t, std::int64_t, std::int64_t, std::int64_t>;

auto place_rows(const std::vector<IntervalRow>& rows, std::int64_t capacity, std::uint64_t seed,
                double time_limit_s) {
    std::vector<Interval> intervals;
    std::int64_t sum = 0;
    for (const auto& [size, birth, death, alignment] : rows) {
        if (size < 0 || birth > death || alignment < 1 || alignment > most_bytes ||
            size > most_bytes - sum - alignment)
            throw std::invalid_argument(
                "a block needs a size of 0 or more, a death that is not before its birth, an "
                "alignment of 1 or more, and all of them together less than 2^62 bytes");
        sum += size + alignment;
        intervals.push_back({size, birth, death, alignment});
    }
    Placement found;
    Control control;
    {
        nb::gil_scoped_release release;
        limit(control, time_limit_s);
        found = place(intervals, capacity, seed, control);
    }
    return std::tuple(found.offsets, found.bytes, found.lower_bound);
}

}  // namespace

void bind_place(nb::module_& m) {
    nb::class_<PoolRules>(m, "PoolRules", "The caching allocator's settings, in bytes.")
        .def(
            "__init__",
            [](PoolRules* self, bool expandable, std::int64_t large_segment, std::int64_t divisions,
               std::int64_t max_split, std::int64_t max_rounding) {
                new (self) PoolRules{expandable, large_segment, divisions, max_split, max_rounding};
            },
            "expandable"_a = false, "large_segment"_a = PoolRules{}.large_segment,
            "divisions"_a = 0, "max_split"_a = PoolRules{}.max_split,
            "max_rounding"_a = PoolRules{}.max_rounding);
    nb::class_<CachingPool>(m, "CachingPool", "The caching allocator, request by request.")
        .def(nb::init<const PoolRules&>(), "rules"_a)
        .def("reserve", &CachingPool::reserve, "size"_a)
        .def("allocate", &CachingPool::allocate, "request"_a, "The number of the block.")
        .def("release", &CachingPool::release, "block"_a)
        .def("block_bytes", &CachingPool::block_bytes, "block"_a)
        .def_prop_ro("allocated_bytes", &CachingPool::allocated)
        .def_prop_ro("reserved_bytes", &CachingPool::reserved)
        .def_prop_ro("peak_bytes", &CachingPool::peak_allocated);
    nb::class_<Replay>(m, "Replay")
        .def_ro("base_allocated", &Replay::base_allocated)
        .def_ro("base_reserved", &Replay::base_reserved)
        .def_ro("peak_allocated", &Replay::peak_allocated)
        .def_ro("peak_reserved", &Replay::peak_reserved)
        .def_ro("large_reserved", &Replay::large_reserved);
    m.def(
        "replay",
        [](const PoolRules& rules, std::vector<std::int64_t> events, std::vector<std::int64_t> held,
           std::vector<std::int64_t> arena, std::int32_t repeats) {
            check_events(events);
            nb::gil_scoped_release release;
            return replay(rules, arena, held, events, repeats);
        },
        "rules"_a, "events"_a, "held"_a, "arena"_a, "repeats"_a,
        "Requests (positive: bytes) and releases (-k: of the k-th request) as the caching "
        "allocator serves them, beside blocks that are held and with free segments that are there "
        "before; so often, and all is given back after each time.");
    m.def(
        "best_arena",
        [](const PoolRules& rules, std::vector<std::int64_t> events, std::int64_t num_events,
           std::uint64_t seed) {
            check_events(events);
            nb::gil_scoped_release release;
            return best_arena(rules, events, num_events, seed);
        },
        "rules"_a, "events"_a, "num_events"_a, "seed"_a,
        "Sizes of segments that serve all large requests of the events: the smallest single one, "
        "or several that are less in all. The events are played until so many were.");
    m.def("place", &place_rows, "intervals"_a, "capacity"_a, "seed"_a, "time_limit_s"_a,
          "Offsets, their end and a proven lower bound for rows (size, birth, death, alignment), "
          "alive from birth up to death, exclusive. It ends within the capacity, where the end is "
          "proven to be the least, or after the time.");
}

}  // namespace rekindle
