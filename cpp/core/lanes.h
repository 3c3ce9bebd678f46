// When each step of a schedule with transfers begins and ends, on three lanes: compute, to the
// host, from the host.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "core/problem.h"
#include "core/simulate.h"

namespace rekindle {

// All times in ns from the start of the schedule.
struct Lanes {
    std::vector<std::int64_t> start;   // per step: of a drop or a release, when the waiting begins
    std::vector<std::int64_t> finish;  // per step
    std::int64_t compute = 0;          // when the lane ends
    std::int64_t to_host = 0;
    std::int64_t from_host = 0;
    std::int64_t cost = 0;                // of the whole schedule, as the problem counts it
    std::optional<std::size_t> too_late;  // the step at which a time reaches 2^62; ends the account
};

// For a schedule that `simulate` found valid, of a problem with a link.
Lanes time_lanes(const Problem& problem, std::span<const Id> schedule,
                 std::span<const Transfer> transfers);

// latency + ceil(bytes * 10^9 / rate), or none where that reaches 2^62.
std::optional<std::int64_t> transfer_ns(const HostLink& link, std::int64_t bytes,
                                        std::int64_t rate);

}  // namespace rekindle
