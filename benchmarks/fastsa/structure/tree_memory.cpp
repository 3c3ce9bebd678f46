#include "tree_memory.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "core/simd.h"

namespace rekindle {

namespace {

using Size = std::int64_t;
constexpr Size nothing = -(Size{1} << 62);  // in the leaves beyond the last slot

constexpr std::size_t idx(std::int32_t i) { return static_cast<std::size_t>(i); }

Size above_line(Size x, Size line) { return x > line ? x : line; }

// The lowest node that covers two leaves.
std::uint32_t common(std::uint32_t a, std::uint32_t b) { return a >> std::bit_width(a ^ b); }

}  // namespace

REKINDLE_SIMD_CLONES static Excess leaf_excess(const Size* memory, Size count, Size low, Size high,
                                               Size base, Size change, Size gap) {
    Size soft = 0, hard = 0;
    for (Size k = 0; k < count; ++k) {
        const Size x = memory[k] + base;
        const Size y = x + (k >= low && k <= high ? change : 0);
        soft += above_line(y, 0) - above_line(x, 0);
        hard += above_line(y, gap) - above_line(x, gap);
    }
    return {soft, hard};
}

REKINDLE_SIMD_CLONES static Size leaf_largest(const Size* memory, Size count) {
    Size most = memory[0];
    for (Size k = 0; k < count; ++k) most = std::max(most, memory[k]);
    return most;
}

template <int leaf_bits>
std::int32_t TreeMemory<leaf_bits>::resize(std::int32_t wanted) {
    group_bits_ = 5;
    while ((wanted >> group_bits_) > (8 << group_bits_)) ++group_bits_;
    num_slots_ = ((wanted >> group_bits_) + 1) << group_bits_;
    num_leaves_ = std::bit_ceil(static_cast<Node>(num_slots_ >> leaf_bits));
    nodes_.assign(2 * std::size_t{num_leaves_}, {nothing, 0});
    weight_.assign(nodes_.size(), 0);
    stale_.reserve(4096);
    partial_.reserve(4096);
    return num_slots_;
}

template <int leaf_bits>
void TreeMemory<leaf_bits>::assign(std::span<const std::int64_t> memory) {
    std::fill(nodes_.begin(), nodes_.end(), Content{nothing, 0});
    if constexpr (leaf_bits > 0) memory_.assign(memory.begin(), memory.end());
    for (Node k = 0; k < static_cast<Node>(num_slots_ >> leaf_bits); ++k) {
        if constexpr (leaf_bits == 0) nodes_[num_leaves_ + k].most = memory[k];
        refresh_leaf(num_leaves_ + k);
    }
    for (Node i = num_leaves_; --i > 0;) refresh(i);
}

template <int leaf_bits>
std::int64_t TreeMemory<leaf_bits>::above(Node node) const {
    Size sum = 0;
    while (node >>= 1) sum += nodes_[node].added;
    return sum;
}

template <int leaf_bits>
std::int64_t TreeMemory<leaf_bits>::at(std::int32_t t) const {
    const Node leaf = num_leaves_ + static_cast<Node>(t >> leaf_bits);
    if constexpr (leaf_bits == 0) return nodes_[leaf].most + above(leaf);
    return memory_[idx(t)] + nodes_[leaf].added + above(leaf);
}

template <int leaf_bits>
std::int64_t TreeMemory<leaf_bits>::peak() const {
    return std::max<Size>(0, nodes_[1].most);
}

template <int leaf_bits>
std::int32_t TreeMemory<leaf_bits>::peak_slot() const {
    Node i = 1;
    while (i < num_leaves_) i = 2 * i + (nodes_[2 * i].most < nodes_[2 * i + 1].most);
    auto t = static_cast<std::int32_t>((i - num_leaves_) << leaf_bits);
    if constexpr (leaf_bits > 0)
        while (memory_[idx(t)] + nodes_[i].added != nodes_[i].most) ++t;
    return t;
}

// --- additions ----------------------------------------------------------------------------------

// In order, each once.
template <int leaf_bits>
void TreeMemory<leaf_bits>::note(std::vector<Node>& nodes, Node node) {
    if (nodes.empty() || nodes.back() != node) nodes.push_back(node);
}

template <int leaf_bits>
void TreeMemory<leaf_bits>::add(std::span<const MemorySegment> segments, int sign) {
    stale_.clear();
    partial_.clear();
    int height = 0;  // of the highest node with an addition
    constexpr std::int32_t mask = (1 << leaf_bits) - 1;
    for (const MemorySegment& s : segments) {
        const Size change = sign * s.change;
        Node first = num_leaves_ + static_cast<Node>(s.first >> leaf_bits);
        Node last = num_leaves_ + static_cast<Node>(s.last >> leaf_bits);
        note(stale_, first);
        if constexpr (leaf_bits > 0) {
            const bool starts_within = s.first & mask, ends_within = (s.last & mask) != mask;
            if (first == last && (starts_within || ends_within)) {
                add_slots(s.first, s.last, change);
                continue;
            }
            if (starts_within) {
                add_slots(s.first, s.first | mask, change);
                ++first;
            }
            if (ends_within) {
                add_slots(s.last & ~mask, s.last, change);
                --last;
            }
        }
        if (first <= last) add_leaves(first, last, change, height);
        note(stale_, num_leaves_ + static_cast<Node>(s.last >> leaf_bits));
    }
    for (Node leaf : partial_) refresh_leaf(leaf);
    // The paths join on their way to the root; above the last addition one may end where nothing
    // changes any more.
    for (int level = 1; !stale_.empty() && stale_.front() > 1; ++level) {
        std::size_t count = 0;
        Node before = 0;
        for (Node child : stale_) {
            const Node node = child >> 1;
            if (node == before) continue;
            before = node;
            if (refresh(node) || level <= height + 1) stale_[count++] = node;
        }
        stale_.resize(count);
    }
}

template <int leaf_bits>
void TreeMemory<leaf_bits>::add_leaves(Node first, Node last, std::int64_t change, int& height) {
    const auto apply = [&](Node i) {
        nodes_[i].most += change;
        if (leaf_bits > 0 || i < num_leaves_) nodes_[i].added += change;
    };
    Node stop = last + 1;
    for (int level = 0; first < stop; ++level, first >>= 1, stop >>= 1) {
        if (!((first | stop) & 1)) continue;
        if (first & 1) apply(first++);
        if (stop & 1) apply(--stop);
        height = std::max(height, level);
    }
    // One slot may have become a step, or empty.
    if constexpr (leaf_bits == 0)
        if (unit_ > 0 && std::abs(change) > BlockMemory::empty_below) refresh_leaf(last);
}

template <int leaf_bits>
void TreeMemory<leaf_bits>::add_slots(std::int32_t first, std::int32_t last, std::int64_t change) {
    for (std::int32_t t = first; t <= last; ++t) memory_[idx(t)] += change;
    note(partial_, num_leaves_ + static_cast<Node>(first >> leaf_bits));
}

template <int leaf_bits>
void TreeMemory<leaf_bits>::refresh_leaf(Node leaf) {
    Content& node = nodes_[leaf];
    if constexpr (leaf_bits == 0) {
        weight_[leaf] = node.most > -BlockMemory::empty_below ? 1 : 0;
    } else {
        constexpr Size count = Size{1} << leaf_bits;
        const Size* memory = memory_.data() + (std::size_t{leaf - num_leaves_} << leaf_bits);
        const Size most = leaf_largest(memory, count);
        node.most = most + node.added;
        if (unit_ > 0) {
            weight_[leaf] = 0;
            for (Size k = 0; k < count; ++k)
                if (memory[k] > -BlockMemory::empty_below)
                    weight_[leaf] += std::exp2(static_cast<double>(memory[k] - most) / unit_);
        }
    }
}

// False: it is as it was.
template <int leaf_bits>
bool TreeMemory<leaf_bits>::refresh(Node node) {
    const Size a = nodes_[2 * node].most, b = nodes_[2 * node + 1].most;
    Content& mine = nodes_[node];
    const Size most = std::max(a, b) + mine.added;
    bool changed = most != mine.most;
    mine.most = most;
    if (unit_ > 0) {
        const double large = weight_[2 * node + (a < b)];
        double weight = weight_[2 * node + !(a < b)];
        if (weight > 0) weight *= std::exp2(-static_cast<double>(std::abs(a - b)) / unit_);
        weight += large;
        changed = changed || weight != weight_[node];
        weight_[node] = weight;
    }
    return changed;
}

// --- sums ---------------------------------------------------------------------------------------

template <int leaf_bits>
struct TreeMemory<leaf_bits>::Sum {
    std::int32_t first, last;
    Size change, rise, soft, gap;
    Excess out;
};

template <int leaf_bits>
Excess TreeMemory<leaf_bits>::excess_change(std::span<const MemorySegment> segments,
                                            Lines lines) const {
    Sum sum{0, 0, 0, 0, lines.soft, lines.hard - lines.soft, {}};
    for (const MemorySegment& s : segments) {
        sum.first = s.first;
        sum.last = s.last;
        sum.change = s.change;
        sum.rise = std::max<Size>(s.change, 0);
        const Node top = common(num_leaves_ + static_cast<Node>(s.first >> leaf_bits),
                                num_leaves_ + static_cast<Node>(s.last >> leaf_bits));
        const int height = std::bit_width(num_leaves_) - std::bit_width(top);
        const auto start = static_cast<std::int32_t>(((top << height) - num_leaves_) << leaf_bits);
        visit(sum, top, start, 1 << (height + leaf_bits), above(top));
    }
    return sum.out;
}

template <int leaf_bits>
void TreeMemory<leaf_bits>::visit(Sum& sum, Node node, std::int32_t start, std::int32_t size,
                                  std::int64_t base) const {
    const Content& here = nodes_[node];
    if (here.most + base + sum.rise <= sum.soft) return;
    if (node >= num_leaves_) {
        if constexpr (leaf_bits == 0) {
            const Size x = here.most + base - sum.soft, y = x + sum.change;
            sum.out.soft += above_line(y, 0) - above_line(x, 0);
            sum.out.hard += above_line(y, sum.gap) - above_line(x, sum.gap);
        } else {
            const Size low = std::max(sum.first, start) - start;
            const Size high = std::min(sum.last, start + size - 1) - start;
            const Size* memory = memory_.data() + start;
            const Size from = here.added + base - sum.soft;
            if (high - low < 4) {
                for (Size k = low; k <= high; ++k) {
                    const Size x = memory[k] + from, y = x + sum.change;
                    sum.out.soft += above_line(y, 0) - above_line(x, 0);
                    sum.out.hard += above_line(y, sum.gap) - above_line(x, sum.gap);
                }
                return;
            }
            const Excess part =
                leaf_excess(memory, Size{1} << leaf_bits, low, high, from, sum.change, sum.gap);
            sum.out.soft += part.soft;
            sum.out.hard += part.hard;
        }
        return;
    }
    base += here.added;
    size >>= 1;
    const std::int32_t middle = start + size;
    if (sum.first < middle) visit(sum, 2 * node, start, size, base);
    if (sum.last >= middle) visit(sum, 2 * node + 1, middle, size, base);
}

template <int leaf_bits>
struct TreeMemory<leaf_bits>::Gain {
    std::int32_t first, stop;
    Size size;
    Lines lines;
    double soft_weight, wanted;
    double& gain;
};

template <int leaf_bits>
bool TreeMemory<leaf_bits>::may_gain(std::int32_t first, std::int32_t stop, std::int64_t size,
                                     Lines lines, double soft_weight, double wanted,
                                     double& gain) const {
    if (first >= stop) return false;
    Gain wish{first, stop, size, lines, soft_weight, wanted, gain};
    // From the lowest node that covers the range and is no smaller than a group.
    const Node mask = (Node{1} << (group_bits_ - leaf_bits)) - 1;
    const Node a = num_leaves_ + static_cast<Node>(first >> leaf_bits);
    const Node b = num_leaves_ + static_cast<Node>((stop - 1) >> leaf_bits);
    const Node top = common(a & ~mask, b | mask);
    const int height = std::bit_width(num_leaves_) - std::bit_width(top);
    const auto start = static_cast<std::int32_t>(((top << height) - num_leaves_) << leaf_bits);
    return visit(wish, top, start, 1 << (height + leaf_bits), above(top));
}

template <int leaf_bits>
bool TreeMemory<leaf_bits>::visit(Gain& wish, Node node, std::int32_t start, std::int32_t size,
                                  std::int64_t base) const {
    const Size most = nodes_[node].most + base;
    if (most <= wish.lines.soft) return false;
    if (size >> group_bits_ == 1) {
        const auto soft = static_cast<double>(std::min(wish.size, most - wish.lines.soft));
        const auto hard =
            static_cast<double>(std::clamp<Size>(most - wish.lines.hard, 0, wish.size));
        const std::int32_t first = std::max(start, wish.first);
        const std::int32_t stop = std::min(start + size, wish.stop);
        wish.gain += static_cast<double>(stop - first) * (wish.soft_weight * soft + hard);
        return wish.gain >= wish.wanted;
    }
    base += nodes_[node].added;
    size >>= 1;
    const std::int32_t middle = start + size;
    return (wish.first < middle && visit(wish, 2 * node, start, size, base)) ||
           (wish.stop > middle && visit(wish, 2 * node + 1, middle, size, base));
}

// --- smooth peak --------------------------------------------------------------------------------

template <int leaf_bits>
void TreeMemory<leaf_bits>::smooth(double unit) {
    unit_ = unit;
    for (Node k = 0; k < static_cast<Node>(num_slots_ >> leaf_bits); ++k)
        refresh_leaf(num_leaves_ + k);
    for (Node i = num_leaves_; --i > 0;) refresh(i);
}

template <int leaf_bits>
double TreeMemory<leaf_bits>::smooth_peak() const {
    return static_cast<double>(nodes_[1].most) + unit_ * std::log2(std::max(weight_[1], 1e-300));
}

template class TreeMemory<0>;
template class TreeMemory<5>;

}  // namespace rekindle
