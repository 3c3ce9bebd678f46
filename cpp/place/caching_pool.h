// The CUDA caching allocator as a model: which block each request gets, and which segments are
// taken from the device for it. The rules are those of c10/cuda/CUDACachingAllocator.cpp, torch
// 2.11 to 2.15, for one stream whose frees are seen at once.
//
//   sizes     rounded up to 512 bytes (roundup_power2_divisions: to a share of a power of two)
//   pools     up to 1 MiB from small segments of 2 MiB, the rest from large ones
//   segments  20 MiB for less than 10 MiB, from there on a multiple of 2 MiB
//   best fit  the smallest free block that is large enough; of equal ones the lowest address
//   split     small blocks always; large ones where more than 1 MiB is left
//   expandable segments: one range of addresses per pool, mapped at its end by 2 or 20 MiB at a
//             time; every block is split down to the request
//
// Segments are assumed to lie in the order in which they were made, and nothing goes back to the
// device: the model begins after empty_cache() and ends before the next.
#pragma once

#include <cstdint>
#include <limits>
#include <set>
#include <tuple>
#include <vector>

namespace rekindle {

struct PoolRules {
    bool expandable = false;
    std::int64_t large_segment = std::int64_t{20} << 20;
    std::int64_t divisions = 0;  // roundup_power2_divisions; 0: none
    std::int64_t max_split = std::numeric_limits<std::int64_t>::max();
    std::int64_t max_rounding = std::int64_t{20} << 20;  // max_non_split_rounding_size
};

class CachingPool {
   public:
    explicit CachingPool(const PoolRules& rules) : rules_(rules) {}

    // A free large segment that is there before anything is asked for.
    void reserve(std::int64_t bytes);

    // The block that a request gets, by a number that `release` takes.
    std::int32_t allocate(std::int64_t request);
    void release(std::int32_t block);

    std::int64_t block_bytes(std::int32_t block) const { return at(block).size; }
    std::int64_t allocated() const { return allocated_; }
    std::int64_t reserved() const { return reserved_[0] + reserved_[1]; }
    std::int64_t large_reserved() const { return reserved_[0]; }
    std::int64_t peak_allocated() const { return peak_allocated_; }
    void forget_peak() { peak_allocated_ = allocated_; }

    std::int64_t rounded(std::int64_t request) const;

   private:
    enum class State : std::uint8_t { free, used, unmapped };
    struct Block {
        std::int64_t size;
        std::int64_t address;
        std::int32_t before;  // neighbours in the segment, or none
        std::int32_t after;
        State state;
        bool is_small;
    };
    using Free = std::set<std::tuple<std::int64_t, std::int64_t, std::int32_t>>;

    const Block& at(std::int32_t id) const { return blocks_[static_cast<std::size_t>(id)]; }
    Block& at(std::int32_t id) { return blocks_[static_cast<std::size_t>(id)]; }
    std::int32_t best_fit(std::int64_t size, bool is_small) const;
    std::int32_t new_segment(std::int64_t size, bool is_small);
    std::int32_t expand(std::int64_t size, bool is_small);
    std::int32_t make(const Block& block);
    void split(std::int32_t id, std::int64_t size);
    void merge_into(std::int32_t id, std::int32_t neighbour);
    void remember(std::int32_t id);
    void forget(std::int32_t id);

    PoolRules rules_;
    std::vector<Block> blocks_;
    std::vector<std::int32_t> spare_;  // numbers of blocks that are no more
    Free free_[2];                     // of large and small blocks
    std::int32_t tail_[2] = {-1, -1};  // the unmapped end of the expandable segments
    std::int64_t num_segments_ = 0;
    std::int64_t allocated_ = 0;
    std::int64_t reserved_[2] = {0, 0};
    std::int64_t peak_allocated_ = 0;
};

// Requests and releases in order: a positive number asks for so many bytes, -k gives back what the
// k-th request got (the first is 1).
using PoolEvents = std::vector<std::int64_t>;

struct Replay {
    std::int64_t base_allocated = 0;  // by what was there before
    std::int64_t base_reserved = 0;
    std::int64_t peak_allocated = 0;  // with that
    std::int64_t peak_reserved = 0;
    std::int64_t large_reserved = 0;
};

// `held` are blocks that are there before and stay; `arena` free segments that are there before.
// The events run `repeats` times; what they leave is given back after each.
Replay replay(const PoolRules& rules, const std::vector<std::int64_t>& arena,
              const std::vector<std::int64_t>& held, const PoolEvents& events,
              std::int32_t repeats);

// Sizes of segments, multiples of 2 MiB, that serve all large requests and are little in all. It
// begins with the smallest single segment; then several are tried, since best fit keeps to a small
// segment what fits there, and so apart what lives long from what does not. Whether sizes are
// enough is no monotone property: each try plays the events, `num_events` in all.
std::vector<std::int64_t> best_arena(const PoolRules& rules, const PoolEvents& events,
                                     std::int64_t num_events, std::uint64_t seed);

// False where an event gives back what is not there.
bool are_valid(const PoolEvents& events);

}  // namespace rekindle
