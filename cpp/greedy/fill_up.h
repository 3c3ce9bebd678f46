// Fill-up of a recomputing sequence under a memory limit (the practical half of TW-Remat, Kumar et
// al. 2019): replay the sequence, keep what it would free for as long as there is room, and skip
// each run whose results are still there. Never adds a run, so the result is always valid.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/control.h"
#include "core/problem.h"

namespace rekindle {

// How a kept value is valued; the lowest goes first.
enum class Keep : std::uint8_t {
    cost_per_byte,       // its op's cost per byte, as published
    chain_per_byte,      // the cost of all that is missing to bring it back, per byte
    chain_per_byte_time  // the same per byte and step until it is wanted again
};

// `sequence` must be valid except that run-once ops may stand several times: the first run counts.
// Stops early (with what it has, which is valid) when `control` expires.
std::vector<Id> fill_up(const Problem& problem, std::span<const Id> sequence, std::int64_t limit,
                        Keep keep, int rounds, Control& control);

}  // namespace rekindle
