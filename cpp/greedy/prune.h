// Runs that need not be: where the older copy of what a run makes can be kept instead.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/control.h"
#include "core/problem.h"

namespace rekindle {

// Removes repeated runs, the most cost per byte first, as long as the peak stays within `limit`,
// and the runs that become dead by that. The schedule must be valid; cost never rises.
std::vector<Id> drop_needless_runs(const Problem& problem, std::span<const Id> schedule,
                                   std::uint64_t limit, Control& control, bool host = true);

}  // namespace rekindle
