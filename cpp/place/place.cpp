#include "place/place.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>

#include "core/random.h"
#include "place/stacking.h"

namespace rekindle {

namespace {

using Order = std::vector<std::int32_t>;

constexpr std::int64_t first_nodes = 4000;  // of the exact search, before it begins anew
constexpr std::int64_t more_nodes = 4;      // times as many, when all orders were tried
constexpr int num_shaken = 2;               // orders at random beside the sorted ones
constexpr int num_targets = 4;              // capacities between the bound and the best found
constexpr int num_moves = 100;              // of the greedy order, between two exact searches

// What blocks are sorted by, the largest first.
enum Measure : std::size_t { size, area, life, sections, crowd, num_measures };

// The first three hold most in the exact search (as "TWA" and its like do for MiniMalloc); the rest
// are for the greedy placement.
constexpr Measure sorted_by[][3] = {
    {crowd, life, area}, {sections, area, crowd}, {life, area, crowd}, {crowd, area, life},
    {area, life, crowd}, {crowd, sections, area}, {size, life, crowd}, {area, size, life},
    {size, area, crowd}, {life, size, area},
};
constexpr std::size_t num_exact = 6;

std::vector<std::vector<double>> measures(const Stacking& s) {
    std::vector<std::vector<double>> found(num_measures, std::vector<double>(s.num()));
    for (std::size_t b = 0; b < s.num(); ++b) {
        std::int64_t most = 0;  // that lives beside it at once
        for (std::int32_t t = s.first[b]; t <= s.last[b]; ++t)
            most = std::max(most, s.live[static_cast<std::size_t>(t)]);
        found[size][b] = static_cast<double>(s.size[b]);
        found[life][b] = static_cast<double>(s.life[b]);
        found[area][b] = found[size][b] * found[life][b];
        found[sections][b] = s.last[b] - s.first[b] + 1;
        found[crowd][b] = static_cast<double>(most);
    }
    return found;
}

class Search {
   public:
    Search(const Stacking& stacking, std::int64_t capacity, std::uint64_t seed, Control& control)
        : s_(stacking), greedy_(stacking), capacity_(capacity), random_(seed), control_(control) {
        best_.bytes = std::numeric_limits<std::int64_t>::max();
        best_.lower_bound = s_.lower_bound;
    }

    Placement run() {
        sorted_orders();
        for (std::int64_t nodes = first_nodes; !is_done(); nodes *= more_nodes)
            for (std::size_t i = 0; i < num_exact + num_shaken && !is_done(); ++i) {
                improve_order(num_moves);
                if (!is_done()) exact(i, nodes);
            }
        return best_;
    }

   private:
    bool is_done() {
        return best_.bytes <= std::max(best_.lower_bound, capacity_) || control_.expired();
    }

    void offer(std::int64_t bytes, const std::vector<std::int64_t>& offsets) {
        if (bytes >= best_.bytes) return;
        best_.bytes = bytes;
        best_.offsets = offsets;
    }

    void sorted_orders() {
        const auto by = measures(s_);
        for (const auto& keys : sorted_by) {
            Order order(s_.num());
            std::iota(order.begin(), order.end(), 0);
            std::stable_sort(order.begin(), order.end(), [&](std::int32_t x, std::int32_t y) {
                const auto a = static_cast<std::size_t>(x), b = static_cast<std::size_t>(y);
                for (const Measure key : keys)
                    if (by[key][a] != by[key][b]) return by[key][a] > by[key][b];
                return false;
            });
            orders_.push_back(order);
            const std::int64_t bytes = greedy_.run(order);
            if (bytes < best_.bytes) {
                current_ = order;
                current_bytes_ = bytes;
                current_offsets_ = greedy_.offsets();
            }
            offer(bytes, greedy_.offsets());
            if (is_done()) return;
        }
    }

    // Blocks that end above the goal move to the front.
    void improve_order(int num_tries) {
        for (int i = 0; i < num_tries && !is_done(); ++i) {
            const std::int64_t goal = std::max(best_.lower_bound, capacity_);
            Order high;
            for (const std::int32_t b : current_) {
                const auto at = static_cast<std::size_t>(b);
                if (current_offsets_[at] + s_.size[at] > goal) high.push_back(b);
            }
            if (high.empty()) return;
            Order next = current_;
            const int moves = 1 + random_.below(3);
            for (int m = 0; m < moves; ++m) {
                const bool any = random_.chance(0.3);
                const std::int32_t block =
                    any ? next[static_cast<std::size_t>(
                              random_.below(static_cast<std::int32_t>(next.size())))]
                        : high[static_cast<std::size_t>(
                              random_.below(static_cast<std::int32_t>(high.size())))];
                const auto it = std::find(next.begin(), next.end(), block);
                const auto place = static_cast<std::int32_t>(it - next.begin());
                const std::int32_t to = any ? random_.below(static_cast<std::int32_t>(next.size()))
                                            : random_.below(place + 1);
                next.erase(it);
                next.insert(next.begin() + to, block);
            }
            const std::int64_t bytes = greedy_.run(next);
            offer(bytes, greedy_.offsets());
            if (bytes > current_bytes_) continue;
            current_ = std::move(next);
            current_bytes_ = bytes;
            current_offsets_ = greedy_.offsets();
        }
    }

    // Searches within the goal, or where none is given within capacities between it and the best.
    void exact(std::size_t which, std::int64_t nodes) {
        const std::int64_t goal = std::max(best_.lower_bound, capacity_);
        const std::int64_t most = best_.bytes - s_.unit;
        std::int64_t within = goal;
        if (capacity_ == 0)
            within = most - (most - goal) / num_targets * (round_++ % (num_targets + 1));
        within = std::clamp(within / s_.unit * s_.unit, goal, most);
        Order order = orders_[which % num_exact];
        if (which >= num_exact)
            for (std::size_t i = 0; i + 1 < order.size(); ++i)
                if (random_.chance(0.1)) std::swap(order[i], order[i + 1]);
        std::vector<std::int32_t> rank(s_.num());
        for (std::size_t i = 0; i < order.size(); ++i)
            rank[static_cast<std::size_t>(order[i])] = static_cast<std::int32_t>(i);
        CanonicalSearch search(s_, within, rank, nodes, control_);
        const Answer answer = search.run();
        if (answer == Answer::impossible)
            best_.lower_bound = std::max(best_.lower_bound, within + s_.unit);
        if (answer == Answer::found) {
            std::int64_t bytes = 0;
            for (std::size_t b = 0; b < s_.num(); ++b)
                bytes = std::max(bytes, search.offsets()[b] + s_.size[b]);
            offer(bytes, search.offsets());
        }
    }

    const Stacking& s_;
    Greedy greedy_;
    std::int64_t capacity_;
    Random random_;
    Control& control_;
    Placement best_;
    std::vector<Order> orders_;
    Order current_;
    std::vector<std::int64_t> current_offsets_;
    std::int64_t current_bytes_ = 0;
    int round_ = 0;
};

}  // namespace

Placement place(const std::vector<Interval>& intervals, std::int64_t capacity, std::uint64_t seed,
                Control& control) {
    if (intervals.empty()) return {};
    const Stacking stacking(intervals);
    return Search(stacking, capacity, seed, control).run();
}

}  // namespace rekindle
