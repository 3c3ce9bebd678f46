// The instance of a placement: lifetimes as runs of sections, and who lives beside whom.
#pragma once

#include <cstdint>
#include <vector>

#include "place/place.h"

namespace rekindle {

struct Stacking {
    explicit Stacking(const std::vector<Interval>& intervals);

    std::size_t num() const { return size.size(); }
    std::int64_t aligned(std::size_t block, std::int64_t offset) const {
        return (offset + alignment[block] - 1) / alignment[block] * alignment[block];
    }

    std::vector<std::int64_t> size, alignment, life;
    // Times between which nobody comes or goes are one section. Blocks that live at no time have
    // none: `last` is before `first`.
    std::vector<std::int32_t> first, last;
    std::vector<std::int64_t> live;             // bytes, per section
    std::vector<std::vector<std::int32_t>> at;  // blocks, per section
    std::vector<std::vector<std::int32_t>> beside;
    std::int64_t lower_bound = 0;
    std::int64_t unit = 1;  // divides all sizes and alignments, so all offsets
};

// Offsets where each block in turn takes the lowest place that is free during its life.
class Greedy {
   public:
    explicit Greedy(const Stacking& stacking);
    std::int64_t run(const std::vector<std::int32_t>& order);  // the end of the highest block
    const std::vector<std::int64_t>& offsets() const { return offsets_; }

   private:
    const Stacking& stacking_;
    std::vector<std::int64_t> offsets_;
    std::vector<char> placed_;
    std::vector<std::pair<std::int64_t, std::int64_t>> taken_;
};

enum class Answer { found, impossible, unknown };

// Depth-first search for a placement within a capacity. `rank` says which block is tried first
// among those of equal offset.
class CanonicalSearch {
   public:
    CanonicalSearch(const Stacking& stacking, std::int64_t capacity,
                    const std::vector<std::int32_t>& rank, std::int64_t max_nodes,
                    Control& control);
    Answer run();
    const std::vector<std::int64_t>& offsets() const { return offset_; }

   private:
    struct Change {
        std::int32_t block;
        std::int64_t floor;
    };
    using Blocks = std::vector<std::int32_t>;

    bool solve(Blocks& open, std::int64_t low, std::int32_t low_rank);
    bool solve_parts(Blocks& open, std::int64_t low, std::int32_t low_rank, bool& is_split);
    bool put(std::int32_t block, std::int64_t offset);
    void take_back(std::int32_t block, std::size_t num_changes);
    bool fits(std::int32_t section, std::int64_t low) const;
    void set_open(std::size_t block, bool is_open);
    bool has_open_neighbour(std::int32_t block) const;

    const Stacking& s_;
    std::int64_t capacity_;
    const std::vector<std::int32_t>& rank_;
    std::int64_t nodes_left_;
    Control& control_;
    std::vector<std::int64_t> offset_;  // of placed blocks
    std::vector<std::int64_t> floor_;   // of open ones: on top of what is placed beside them
    std::vector<char> is_open_;
    std::vector<Change> changes_;
    std::vector<std::int64_t> open_bytes_;  // per section
};

}  // namespace rekindle
