// The add-max segment tree (FastSA, 2.1.1, and C.2 for the smooth peak) with the interface of
// BlockMemory, to be measured in its place.
//
// A flat array of nodes, the children of i at 2i and 2i + 1. Additions stay at the node that they
// cover and are never pushed down: a node's `most` includes its own additions, not its ancestors'.
// Writes go bottom-up: the nodes of all segments first, then the paths above their borders level by
// level, each node once. Reads go top-down from the lowest node that covers the range and leave out
// what lies below the lines. Nothing is allocated between two calls of `resize`.
//
// A leaf is one slot (leaf_bits = 0, the paper's tree) or a block of 2^leaf_bits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "anneal/memory.h"

namespace rekindle {

template <int leaf_bits>
class TreeMemory {
   public:
    std::int32_t resize(std::int32_t wanted);
    void assign(std::span<const std::int64_t> memory);

    std::int64_t at(std::int32_t t) const;
    std::int64_t peak() const;
    std::int32_t peak_slot() const;

    void add(std::span<const MemorySegment> segments, int sign);
    Excess excess_change(std::span<const MemorySegment> segments, Lines lines) const;
    bool may_gain(std::int32_t first, std::int32_t stop, std::int64_t size, Lines lines,
                  double soft_weight, double wanted, double& gain) const;

    void smooth(double unit);
    double smooth_peak() const;

   private:
    using Node = std::uint32_t;
    struct Content {
        std::int64_t most;   // in the subtree, `added` included, the ancestors' left out
        std::int64_t added;  // to the whole subtree
    };
    struct Gain;
    struct Sum;

    void add_leaves(Node first, Node last, std::int64_t change, int& height);
    void add_slots(std::int32_t first, std::int32_t last, std::int64_t change);
    void note(std::vector<Node>& nodes, Node node);
    void refresh_leaf(Node leaf);
    bool refresh(Node node);
    std::int64_t above(Node node) const;  // what its ancestors add
    void visit(Sum& sum, Node node, std::int32_t start, std::int32_t size, std::int64_t base) const;
    bool visit(Gain& gain, Node node, std::int32_t start, std::int32_t size,
               std::int64_t base) const;

    Node num_leaves_ = 0;  // a power of two
    std::int32_t num_slots_ = 0;
    int group_bits_ = 5;  // `may_gain` looks at groups of the size that BlockMemory's blocks have
    std::vector<Content> nodes_;
    std::vector<std::int64_t> memory_;  // per slot, without the nodes' additions; leaf_bits > 0
    double unit_ = 0;
    std::vector<double> weight_;  // per node: sum over its steps of 2^((memory - most) / unit)
    std::vector<Node> stale_, partial_;
};

}  // namespace rekindle
