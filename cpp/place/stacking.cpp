#include "place/stacking.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace rekindle {

Stacking::Stacking(const std::vector<Interval>& intervals) {
    std::vector<std::int64_t> times;
    for (const Interval& i : intervals) {
        size.push_back(i.size);
        alignment.push_back(i.alignment);
        times.push_back(i.birth);
        times.push_back(i.death);
        unit = std::gcd(size.size() == 1 ? i.size : unit, i.size);
    }
    for (const Interval& i : intervals)
        if (i.alignment > 1) unit = std::gcd(unit, i.alignment);
    if (unit == 0) unit = 1;
    std::sort(times.begin(), times.end());
    times.erase(std::unique(times.begin(), times.end()), times.end());
    const auto section = [&times](std::int64_t t) {
        return static_cast<std::int32_t>(std::lower_bound(times.begin(), times.end(), t) -
                                         times.begin());
    };
    live.assign(times.size(), 0);
    at.resize(times.size());
    beside.resize(num());
    std::vector<std::int32_t> by_birth(num());
    for (std::size_t b = 0; b < num(); ++b) {
        by_birth[b] = static_cast<std::int32_t>(b);
        first.push_back(section(intervals[b].birth));
        life.push_back(intervals[b].death - intervals[b].birth);
        // A block of no bytes is nobody's neighbour.
        last.push_back(size[b] > 0 ? section(intervals[b].death) - 1 : first[b] - 1);
        for (std::int32_t t = first[b]; t <= last[b]; ++t) {
            live[static_cast<std::size_t>(t)] += size[b];
            at[static_cast<std::size_t>(t)].push_back(static_cast<std::int32_t>(b));
        }
    }
    for (const std::int64_t bytes : live) lower_bound = std::max(lower_bound, bytes);
    const auto begins = [this](std::int32_t b) { return first[static_cast<std::size_t>(b)]; };
    const auto ends = [this](std::int32_t b) { return last[static_cast<std::size_t>(b)]; };
    std::sort(by_birth.begin(), by_birth.end(), [&](std::int32_t a, std::int32_t b) {
        return std::pair(begins(a), a) < std::pair(begins(b), b);
    });
    std::vector<std::int32_t> alive;
    for (const std::int32_t b : by_birth) {
        if (ends(b) < begins(b)) continue;
        std::erase_if(alive, [&](std::int32_t a) { return ends(a) < begins(b); });
        for (const std::int32_t a : alive) {
            beside[static_cast<std::size_t>(a)].push_back(b);
            beside[static_cast<std::size_t>(b)].push_back(a);
        }
        alive.push_back(b);
    }
}

Greedy::Greedy(const Stacking& stacking)
    : stacking_(stacking), offsets_(stacking.num(), 0), placed_(stacking.num(), 0) {}

std::int64_t Greedy::run(const std::vector<std::int32_t>& order) {
    std::fill(placed_.begin(), placed_.end(), 0);
    std::int64_t highest = 0;
    for (const std::int32_t id : order) {
        const auto block = static_cast<std::size_t>(id);
        taken_.clear();
        for (const std::int32_t other : stacking_.beside[block]) {
            const auto o = static_cast<std::size_t>(other);
            if (placed_[o]) taken_.emplace_back(offsets_[o], offsets_[o] + stacking_.size[o]);
        }
        std::sort(taken_.begin(), taken_.end());
        std::int64_t offset = 0;
        for (const auto& [begin, end] : taken_) {
            if (offset + stacking_.size[block] <= begin) break;
            offset = std::max(offset, stacking_.aligned(block, end));
        }
        offsets_[block] = offset;
        placed_[block] = 1;
        highest = std::max(highest, offset + stacking_.size[block]);
    }
    return highest;
}

CanonicalSearch::CanonicalSearch(const Stacking& stacking, std::int64_t capacity,
                                 const std::vector<std::int32_t>& rank, std::int64_t max_nodes,
                                 Control& control)
    : s_(stacking), capacity_(capacity), rank_(rank), nodes_left_(max_nodes), control_(control),
      offset_(stacking.num(), 0), floor_(stacking.num(), 0), is_open_(stacking.num(), 0),
      open_bytes_(stacking.at.size(), 0) {}

Answer CanonicalSearch::run() {
    if (s_.lower_bound > capacity_) return Answer::impossible;
    Blocks open;
    for (std::size_t b = 0; b < s_.num(); ++b) {
        if (s_.last[b] < s_.first[b]) continue;
        open.push_back(static_cast<std::int32_t>(b));
        set_open(b, true);
    }
    if (solve(open, 0, -1)) return Answer::found;
    return nodes_left_ < 0 ? Answer::unknown : Answer::impossible;
}

// Places all open blocks at offsets from `low` on; those at `low` itself have a higher rank than
// `low_rank`, since blocks of equal offset are placed in that order.
bool CanonicalSearch::solve(Blocks& open, std::int64_t low, std::int32_t low_rank) {
    if (open.empty()) return true;
    bool is_split = false;
    const bool parts_done = solve_parts(open, low, low_rank, is_split);
    if (is_split) return parts_done;
    if (--nodes_left_ < 0 || (nodes_left_ % 64 == 0 && control_.expired())) {
        nodes_left_ = std::min<std::int64_t>(nodes_left_, -1);
        return false;
    }
    // Who is put so high that another fits below leaves a gap that need not be.
    std::int64_t bound = capacity_ + 1;
    for (const std::int32_t id : open) {
        const auto b = static_cast<std::size_t>(id);
        bound = std::min(bound, std::max(floor_[b], low) + s_.size[b]);
    }
    Blocks candidates;
    for (const std::int32_t id : open) {
        const auto b = static_cast<std::size_t>(id);
        if (floor_[b] >= bound || floor_[b] < low) continue;
        if (floor_[b] == low && rank_[b] <= low_rank) continue;
        candidates.push_back(id);
    }
    std::sort(candidates.begin(), candidates.end(), [this](std::int32_t x, std::int32_t y) {
        const auto a = static_cast<std::size_t>(x), b = static_cast<std::size_t>(y);
        return std::pair(floor_[a], rank_[a]) < std::pair(floor_[b], rank_[b]);
    });
    for (const std::int32_t id : candidates) {
        const auto b = static_cast<std::size_t>(id);
        const std::int64_t offset = floor_[b];
        const std::size_t num_changes = changes_.size();
        const bool may_go_on = put(id, offset);
        // Nobody is left who could be in its way, or have it in theirs.
        const bool is_free = may_go_on && !has_open_neighbour(id);
        if (may_go_on) {
            Blocks rest;
            rest.reserve(open.size());
            for (const std::int32_t other : open)
                if (other != id) rest.push_back(other);
            if (solve(rest, offset, rank_[b])) return true;
        }
        take_back(id, num_changes);
        if (nodes_left_ < 0 || is_free) return false;
    }
    return false;
}

// Where open blocks fall apart in time, each part is a search of its own.
bool CanonicalSearch::solve_parts(Blocks& open, std::int64_t low, std::int32_t low_rank,
                                  bool& is_split) {
    std::sort(open.begin(), open.end(), [this](std::int32_t x, std::int32_t y) {
        const auto a = static_cast<std::size_t>(x), b = static_cast<std::size_t>(y);
        return std::pair(s_.first[a], x) < std::pair(s_.first[b], y);
    });
    std::vector<Blocks> parts;
    std::int32_t reach = -1;
    for (const std::int32_t id : open) {
        const auto b = static_cast<std::size_t>(id);
        if (parts.empty() || s_.first[b] > reach) parts.emplace_back();
        parts.back().push_back(id);
        reach = std::max(reach, s_.last[b]);
    }
    is_split = parts.size() > 1;
    if (!is_split) return false;
    std::sort(parts.begin(), parts.end(),
              [](const Blocks& a, const Blocks& b) { return a.size() < b.size(); });
    const std::size_t num_changes = changes_.size();
    std::size_t num_done = 0;
    bool all = true;
    for (Blocks& part : parts) {
        if (!solve(part, low, low_rank)) {
            all = false;
            break;
        }
        ++num_done;
    }
    if (all) return true;
    // What the parts before have placed is taken back: nobody above knows of it.
    for (std::size_t p = 0; p < num_done; ++p)
        for (const std::int32_t id : parts[p]) set_open(static_cast<std::size_t>(id), true);
    while (changes_.size() > num_changes) {
        floor_[static_cast<std::size_t>(changes_.back().block)] = changes_.back().floor;
        changes_.pop_back();
    }
    return false;
}

// Puts a block there and raises its open neighbours; false where they cannot be stacked any more.
bool CanonicalSearch::put(std::int32_t id, std::int64_t offset) {
    const auto block = static_cast<std::size_t>(id);
    offset_[block] = offset;
    set_open(block, false);
    const std::int64_t top = offset + s_.size[block];
    std::int32_t from = s_.first[block], to = s_.last[block];
    for (const std::int32_t other : s_.beside[block]) {
        const auto o = static_cast<std::size_t>(other);
        if (!is_open_[o] || floor_[o] >= top) continue;
        changes_.push_back({other, floor_[o]});
        floor_[o] = s_.aligned(o, top);
        if (floor_[o] + s_.size[o] > capacity_) return false;
        from = std::min(from, s_.first[o]);
        to = std::max(to, s_.last[o]);
    }
    for (std::int32_t t = from; t <= to; ++t)
        if (!fits(t, offset)) return false;
    return true;
}

void CanonicalSearch::take_back(std::int32_t id, std::size_t num_changes) {
    set_open(static_cast<std::size_t>(id), true);
    while (changes_.size() > num_changes) {
        floor_[static_cast<std::size_t>(changes_.back().block)] = changes_.back().floor;
        changes_.pop_back();
    }
}

// Whether the open blocks of a section can be stacked below the capacity, from the lowest offset
// that is left to one of them. That those left to the others are higher is not looked at: it prunes
// more, and takes so long that fewer placements are found.
bool CanonicalSearch::fits(std::int32_t section, std::int64_t low) const {
    const auto t = static_cast<std::size_t>(section);
    const std::int64_t most = capacity_ - open_bytes_[t];
    if (open_bytes_[t] == 0) return true;
    if (low > most) return false;
    for (const std::int32_t id : s_.at[t]) {
        const auto b = static_cast<std::size_t>(id);
        if (is_open_[b] && floor_[b] <= most) return true;
    }
    return false;
}

void CanonicalSearch::set_open(std::size_t block, bool is_open) {
    is_open_[block] = is_open;
    const std::int64_t change = is_open ? s_.size[block] : -s_.size[block];
    for (std::int32_t t = s_.first[block]; t <= s_.last[block]; ++t)
        open_bytes_[static_cast<std::size_t>(t)] += change;
}

bool CanonicalSearch::has_open_neighbour(std::int32_t id) const {
    for (const std::int32_t other : s_.beside[static_cast<std::size_t>(id)])
        if (is_open_[static_cast<std::size_t>(other)]) return true;
    return false;
}

}  // namespace rekindle
