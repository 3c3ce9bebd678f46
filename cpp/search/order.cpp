// The beam search of order.h. Sets of ops are bit sets, found again by a hash that is the exclusive
// or of one random number per op; equal hashes are compared bit by bit.
#include "search/order.h"

#include <algorithm>
#include <bit>
#include <unordered_map>

#include "core/random.h"
#include "core/simulate.h"

namespace rekindle {

namespace {

using Word = std::uint64_t;

// A set of ops that have run, and how it came about: `first` ran on top of the parent, then
// whatever ran by the rules.
struct Set {
    std::vector<Word> ran;
    std::uint64_t hash = 0;
    std::int64_t memory = 0;
    std::int32_t count = 0;
    std::int32_t parent = -1;  // in the list of sets that went on
    Id first = -1;

    bool has(Id op) const { return ran[idx(op) >> 6] >> (op & 63) & 1; }
};

struct Kept {
    std::int32_t parent;
    Id first;
};

class BeamSearch {
   public:
    BeamSearch(const Problem& problem, Control& control) : p_(problem), control_(control) {
        lasting_.assign(idx(p_.num_values()), 0);
        for (Id v : p_.targets) lasting_[idx(v)] = 1;
        for (Id v : p_.held) lasting_[idx(v)] = 1;
        // Bytes of a set: its bits, and some 160 for the rest of it and its entry in the hash
        // table.
        max_stored_ = (std::size_t{256} << 20) / (idx(p_.num_ops()) / 8 + 160);
        // A fixed seed: the same search in every run.
        Random random(1);
        for (Id i = 0; i < p_.num_ops(); ++i) {
            key_.push_back(random.next());
            if (p_.inputs[i].empty()) sources_.push_back(i);
        }
    }

    // An order whose steps all need at most `limit`; empty if none was found; then, if
    // `complete`, there is none.
    std::vector<Id> search(std::int64_t limit, std::size_t width, std::int64_t max_sets) {
        limit_ = limit;
        width_ = width;
        stored_ = 0;
        complete_ = true;
        kept_.clear();
        layers_.assign(idx(p_.num_ops()) + 1, {});
        const std::int64_t stop = looked_at_ + max_sets;
        Set empty;
        empty.ran.assign((idx(p_.num_ops()) + 63) / 64, 0);
        for (Id op : sources_) close(empty, op, nullptr);
        offer(std::move(empty));
        for (std::size_t count = 0; count + 1 < layers_.size(); ++count) {
            Layer& layer = layers_[count];
            shrink(layer);
            for (Set& set : layer.sets) {
                if (looked_at_ >= stop || stored_ > max_stored_ ||
                    ((++looked_at_ & 63) == 0 && control_.expired())) {
                    complete_ = false;
                    return {};
                }
                expand(set);
                if (!layers_.back().sets.empty()) return trace_back();
            }
            stored_ -= layer.sets.size();
            layer = {};
        }
        return layers_.back().sets.empty() ? std::vector<Id>{} : trace_back();
    }

    bool complete() const { return complete_; }
    std::int64_t looked_at() const { return looked_at_; }

   private:
    struct Layer {
        std::vector<Set> sets;
        std::unordered_map<std::uint64_t, std::size_t> by_hash;
    };

    // --- one op on top of a set -----------------------------------------------------------------

    bool ready(const Set& set, Id op) const {
        for (Id v : p_.inputs[op])
            if (!set.has(p_.producer_of(v))) return false;
        return true;
    }

    // Whether the op is the last of the value's readers.
    bool dies(const Set& set, Id v, Id op) const {
        if (lasting_[idx(v)]) return false;
        for (Id reader : p_.readers[v])
            if (reader != op && !set.has(reader)) return false;
        return true;
    }

    // What the op adds to memory once it has run, and (`during`) while it runs.
    std::int64_t change(const Set& set, Id op, std::int64_t& during) const {
        during = p_.workspace[idx(op)];
        std::int64_t after = 0;
        for (Id v : p_.outputs[op]) {
            during += p_.size_of(v);
            if (lasting_[idx(v)] || !p_.readers[v].empty()) after += p_.size_of(v);
        }
        for (Id v : p_.inputs[op])
            if (dies(set, v, op)) after -= p_.size_of(v);
        const auto pairs = p_.inplace[op];
        for (std::size_t k = 0; k < pairs.size(); k += 2)
            if (dies(set, pairs[k], op)) during -= p_.size_of(pairs[k + 1]);
        return after;
    }

    void run(Set& set, Id op, std::int64_t after) const {
        set.ran[idx(op) >> 6] |= Word{1} << (op & 63);
        set.hash ^= key_[idx(op)];
        set.memory += after;
        ++set.count;
    }

    // Runs the op if the first rule lets it, and then all that can run by it.
    void close(Set& set, Id op, std::vector<Id>* ran) {
        work_.assign(1, op);
        while (!work_.empty()) {
            const Id next = work_.back();
            work_.pop_back();
            if (set.has(next) || !ready(set, next)) continue;
            std::int64_t during;
            const std::int64_t after = change(set, next, during);
            if (after > 0 || set.memory + during > limit_) continue;
            run(set, next, after);
            if (ran) ran->push_back(next);
            queue_neighbours(set, next);
        }
    }

    // The ops that can run, or free more, now that this one has run.
    void queue_neighbours(const Set& set, Id op) {
        for (Id v : p_.inputs[op])
            for (Id reader : p_.readers[v])
                if (!set.has(reader)) work_.push_back(reader);
        for (Id v : p_.outputs[op])
            for (Id reader : p_.readers[v]) work_.push_back(reader);
    }

    // --- the sets that follow -------------------------------------------------------------------

    void expand(const Set& set) {
        const auto parent = static_cast<std::int32_t>(kept_.size());
        kept_.push_back({set.parent, set.first});
        followers_.clear();
        for (std::size_t w = 0; w < set.ran.size(); ++w)
            for (Word bits = set.ran[w]; bits; bits &= bits - 1) {
                const auto op = static_cast<Id>(w * 64 + idx(std::countr_zero(bits)));
                for (Id v : p_.outputs[op])
                    for (Id reader : p_.readers[v])
                        if (!set.has(reader) && p_.inputs[reader][0] == v && follow(set, reader))
                            return finish_expand(parent);
            }
        for (Id op : sources_)
            if (!set.has(op) && follow(set, op)) break;
        finish_expand(parent);
    }

    // True: nothing but this one need be looked at (the second rule).
    bool follow(const Set& set, Id op) {
        if (!ready(set, op)) return false;
        std::int64_t during;
        const std::int64_t after = change(set, op, during);
        if (set.memory + during > limit_) return false;
        Set next = set;
        next.first = op;
        closed_.clear();
        apply(next, op, after, &closed_);
        const bool only = next.memory <= set.memory &&
                          std::ranges::none_of(closed_, [&](Id c) { return ready(set, c); });
        if (only) followers_.clear();
        followers_.push_back(std::move(next));
        return only;
    }

    void apply(Set& set, Id op, std::int64_t after, std::vector<Id>* ran) {
        run(set, op, after);
        around_.clear();
        work_.clear();
        queue_neighbours(set, op);
        around_.swap(work_);
        for (Id next : around_)
            if (!set.has(next)) close(set, next, ran);
    }

    void finish_expand(std::int32_t parent) {
        for (Set& next : followers_) {
            next.parent = parent;
            offer(std::move(next));
        }
    }

    void offer(Set&& set) {
        Layer& layer = layers_[idx(set.count)];
        const auto [at, is_new] = layer.by_hash.try_emplace(set.hash, layer.sets.size());
        if (!is_new && layer.sets[at->second].ran == set.ran) return;
        layer.sets.push_back(std::move(set));
        ++stored_;
        if (layer.sets.size() > 4 * width_ + 1024) shrink(layer);
    }

    // Only the sets with the least memory stay.
    void shrink(Layer& layer) {
        if (layer.sets.size() <= width_) return;
        complete_ = false;
        const auto middle = layer.sets.begin() + static_cast<std::ptrdiff_t>(width_);
        std::nth_element(layer.sets.begin(), middle, layer.sets.end(),
                         [](const Set& a, const Set& b) {
                             return a.memory != b.memory ? a.memory < b.memory : a.hash < b.hash;
                         });
        stored_ -= layer.sets.size() - width_;
        layer.sets.resize(width_);
        layer.by_hash.clear();
        for (std::size_t k = 0; k < width_; ++k) layer.by_hash.emplace(layer.sets[k].hash, k);
    }

    // The way to the full set, found again step by step.
    std::vector<Id> trace_back() {
        const Set& last = layers_.back().sets.front();
        std::vector<Id> firsts;
        Kept at{last.parent, last.first};
        while (at.first >= 0) {
            firsts.push_back(at.first);
            at = kept_[idx(at.parent)];
        }
        std::reverse(firsts.begin(), firsts.end());
        std::vector<Id> order;
        Set set;
        set.ran.assign((idx(p_.num_ops()) + 63) / 64, 0);
        for (Id op : sources_) close(set, op, &order);
        for (Id op : firsts) {
            std::int64_t during;
            const std::int64_t after = change(set, op, during);
            order.push_back(op);
            apply(set, op, after, &order);
        }
        return order;
    }

    const Problem& p_;
    Control& control_;
    std::int64_t limit_ = 0, looked_at_ = 0;
    std::size_t width_ = 0;
    std::size_t stored_ = 0, max_stored_;  // sets in all layers; a few hundred megabytes
    bool complete_ = true;                 // no set was left out
    std::vector<std::uint8_t> lasting_;    // per value: stays to the end
    std::vector<std::uint64_t> key_;       // per op, for hashes
    std::vector<Id> sources_;              // ops that read nothing
    std::vector<Layer> layers_;
    std::vector<Kept> kept_;
    std::vector<Set> followers_;
    std::vector<Id> work_, around_, closed_;
};

}  // namespace

OrderResult smallest_order(const Problem& problem, std::span<const Id> start,
                           const OrderSearch& search, Control& control) {
    OrderResult found;
    found.order.assign(start.begin(), start.end());
    found.peak = static_cast<std::int64_t>(simulate(problem, start).peak);
    found.at_least = search.budget;
    BeamSearch beam(problem, control);
    // A narrow beam finds nearly the best order in a moment, and what it finds narrows the range
    // that the wider ones bisect. Only a search that left nothing out proves anything.
    for (std::size_t width = 1; width <= search.max_width; width *= 4) {
        // Bisection between what is proven and what is found, then wider.
        std::int64_t low = found.at_least;
        while (low < found.peak) {
            const std::int64_t left = search.max_sets - beam.looked_at();
            if (left <= 0 || control.expired()) break;
            const std::int64_t middle = low + (found.peak - low) / 2;
            std::vector<Id> order = beam.search(middle, width, left);
            found.sets = beam.looked_at();
            if (!order.empty()) {
                found.peak = static_cast<std::int64_t>(simulate(problem, order).peak);
                found.order = std::move(order);
            } else {
                low = middle + 1;
                if (beam.complete()) found.at_least = low;
            }
        }
        if (found.at_least >= found.peak) break;
    }
    return found;
}

}  // namespace rekindle
