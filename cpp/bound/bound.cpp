// The network of bound.h, and the search for the best price of memory.
#include "bound/bound.h"

#include <algorithm>
#include <cmath>

#include "bound/min_cut.h"

namespace rekindle {

namespace {

constexpr int max_cuts = 40;

// Ops without which some target is missing, or that must run: all others may be left out.
std::vector<std::uint8_t> needed_ops(const Problem& p) {
    std::vector<std::uint8_t> needed(idx(p.num_ops()), 0);
    std::vector<Id> todo;
    auto need = [&](Id i) {
        if (needed[idx(i)]) return;
        needed[idx(i)] = 1;
        todo.push_back(i);
    };
    for (Id v : p.targets) need(p.producer_of(v));
    for (Id i = 0; i < p.num_ops(); ++i)
        if (p.is_once(i)) need(i);
    while (!todo.empty()) {
        const Id i = todo.back();
        todo.pop_back();
        for (Id v : p.inputs[i]) need(p.producer_of(v));
    }
    return needed;
}

// What one price leaves: a line in the price, `again + price * kept`.
struct Line {
    double recompute_cost = 0, kept_bytes = 0;
    double at(double price) const { return recompute_cost + price * kept_bytes; }
};

// The two labels of an op are nodes, joined with the source where they hold for sure and with the
// sink where they cannot. A node on the source's side has its label.
class BoundNetwork {
   public:
    BoundNetwork(const Problem& problem, Id op)
        : p_(problem), op_(op), needed_(needed_ops(problem)), before_(ancestors(problem, op)),
          after_(descendants(problem, op)), flow_(0) {
        take_own_values();
        number_nodes();
        flow_ = MaxFlow(idx(num_nodes_));
        // Whole capacities lose nothing that matters, and all of them together stay below infinite.
        max_capacity_ = 1e18 / static_cast<double>(num_nodes_);
        scale_ = max_capacity_ / 8 / std::max(1.0, total_cost_);
    }

    bool needed() const { return needed_[idx(op_)] != 0; }
    std::int64_t own_bytes() const { return own_bytes_; }  // what the op itself has in memory
    double total_cost() const { return total_cost_; }
    double total_size() const { return total_size_; }

    // The least `again + price * kept`, never above the truth.
    double cut(double price, Control& control) {
        flow_.clear();
        for (Id i = 0; i < p_.num_ops(); ++i)
            if (i != op_ && needed_[idx(i)]) add_op(i);
        for (Id v = 0; v < p_.num_values(); ++v)
            if (value_node_[idx(v)] >= 0) add_value(v, price);
        return static_cast<double>(flow_.run(source, sink, control, true)) / scale_;
    }

    // By the last cut.
    std::vector<Id> kept() const {
        std::vector<Id> result;
        for (Id v = 0; v < p_.num_values(); ++v)
            if (value_node_[idx(v)] >= 0 && flow_.on_source_side(value_node_[idx(v)]) &&
                !flow_.on_source_side(runs_after(p_.producer_of(v))))
                result.push_back(v);
        return result;
    }
    Line line(const std::vector<Id>& kept) const {
        Line result;
        for (Id v : kept) result.kept_bytes += static_cast<double>(p_.size_of(v));
        for (Id i = 0; i < p_.num_ops(); ++i)
            if (i != op_ && needed_[idx(i)] && flow_.on_source_side(runs_after(i)) &&
                !flow_.on_source_side(not_before(i)))
                result.recompute_cost += static_cast<double>(p_.cost_of(i));
        return result;
    }

   private:
    static constexpr std::int32_t source = 0, sink = 1;

    std::int32_t not_before(Id i) const {
        return before_[idx(i)] ? sink : after_[idx(i)] ? source : op_node_[idx(i)] + 1;
    }
    std::int32_t runs_after(Id i) const { return after_[idx(i)] ? source : op_node_[idx(i)]; }

    // What the op itself has in memory is there for free; so is what the loss has left held.
    void take_own_values() {
        free_.assign(idx(p_.num_values()), 0);
        own_bytes_ = p_.workspace[idx(op_)];
        auto take = [&](Id v) {
            if (free_[idx(v)]) return;
            free_[idx(v)] = 1;
            own_bytes_ += p_.size_of(v);
        };
        for (Id v : p_.inputs[op_]) take(v);
        for (Id v : p_.outputs[op_]) take(v);
        const auto pairs = p_.inplace[op_];
        for (std::size_t k = 1; k < pairs.size(); k += 2) own_bytes_ -= p_.size_of(pairs[k]);
        if (p_.loss >= 0 && before_[idx(p_.loss)])
            for (Id v : p_.held) take(v);
    }

    void number_nodes() {
        op_node_.assign(idx(p_.num_ops()), -1);
        value_node_.assign(idx(p_.num_values()), -1);
        target_.assign(idx(p_.num_values()), 0);
        for (Id v : p_.targets) target_[idx(v)] = 1;
        for (Id i = 0; i < p_.num_ops(); ++i) {
            if (!needed_[idx(i)] || after_[idx(i)] || i == op_) continue;
            op_node_[idx(i)] = num_nodes_;
            num_nodes_ += before_[idx(i)] ? 1 : 2;
            total_cost_ += static_cast<double>(p_.cost_of(i));
            for (Id v : p_.outputs[i])
                if (!free_[idx(v)]) {
                    value_node_[idx(v)] = num_nodes_++;
                    total_size_ += static_cast<double>(p_.size_of(v));
                }
        }
    }

    void add_op(Id i) {
        // An edge a -> b without limit says: with a, b is on the source's side too.
        // Not before the moment, hence after it.
        // Closed: where a producer has not run, its reader has not.
        if (!before_[idx(i)] && !after_[idx(i)]) {
            flow_.add_edge(not_before(i), runs_after(i), MaxFlow::infinite);
            for (Id v : p_.inputs[i])
                if (!before_[idx(p_.producer_of(v))])
                    flow_.add_edge(not_before(p_.producer_of(v)), not_before(i), MaxFlow::infinite);
        }
        // Cut where the op runs after although it has run before: its cost is paid once more.
        if (!after_[idx(i)]) flow_.add_edge(runs_after(i), not_before(i), recompute_capacity(i));
        for (Id v : p_.inputs[i])
            if (value_node_[idx(v)] >= 0)
                flow_.add_edge(runs_after(i), value_node_[idx(v)], MaxFlow::infinite);
    }

    void add_value(Id v, double price) {
        // A value's node is on the source's side where the value is wanted after the moment. The
        // edge to its producer is cut where that does not run after: then the value is kept, at the
        // price.
        if (target_[idx(v)]) flow_.add_edge(source, value_node_[idx(v)], MaxFlow::infinite);
        const double keep = std::floor(scale_ * price * static_cast<double>(p_.size_of(v)));
        flow_.add_edge(value_node_[idx(v)], runs_after(p_.producer_of(v)),
                       static_cast<std::int64_t>(std::min(keep, max_capacity_)));
    }

    std::int64_t recompute_capacity(Id i) const {
        if (p_.is_once(i)) return MaxFlow::infinite;
        return static_cast<std::int64_t>(std::floor(scale_ * static_cast<double>(p_.cost_of(i))));
    }

    const Problem& p_;
    Id op_;
    std::vector<std::uint8_t> needed_, before_, after_, free_, target_;  // per op; per value
    MaxFlow flow_;
    std::vector<std::int32_t> op_node_, value_node_;
    std::int32_t num_nodes_ = 2;
    std::int64_t own_bytes_ = 0;
    double total_cost_ = 0, total_size_ = 0, scale_ = 1, max_capacity_ = 0;
};

}  // namespace

Bound bound_at(const Problem& p, Id op, std::int64_t budget, Control& control, double price,
               double least) {
    Bound best;
    BoundNetwork network(p, op);
    if (!network.needed()) return best;
    if (budget < network.own_bytes()) {
        best.infeasible = true;
        return best;
    }
    const auto room = static_cast<double>(budget - network.own_bytes());
    if (network.total_size() <= room) return best;  // everything fits

    // Between a price at which too much is kept and one at which not.
    double low = 0, high = -1;
    Line at_low{0, network.total_size()}, at_high;  // what costs nothing: all is kept
    if (price <= 0) price = network.total_cost() / (8 * std::max(1.0, room)) + 1e-12;
    for (int k = 0; k < max_cuts && price < 1e30; ++k) {
        const double cut = network.cut(price, control);
        if (control.expired()) break;
        std::vector<Id> kept = network.kept();
        const Line line = network.line(kept);
        const double extra = cut - price * room;
        if (extra > best.extra) {
            best.extra = extra;
            best.price = price;
            best.kept = std::move(kept);
        }
        // Each op counts as repeated once at most, so no choice that fits has more extra cost.
        if (extra > network.total_cost()) {  // more than recomputing everything
            best.infeasible = true;
            return best;
        }
        if (line.kept_bytes > room) {
            low = price;
            at_low = line;
        } else {
            high = price;
            at_high = line;
        }
        if (high < 0) {
            price *= 4;
            continue;
        }
        // Where the two lines meet: no price has a bound above theirs there.
        if (!(at_low.kept_bytes > at_high.kept_bytes)) break;
        price = (at_high.recompute_cost - at_low.recompute_cost) /
                (at_low.kept_bytes - at_high.kept_bytes);
        if (!(price > low && price < high)) break;
        const double most = at_low.at(price) - price * room;
        if (most <= std::max(least, (1 + 1e-5) * best.extra)) break;
    }
    // `price * room` was rounded: a bound must not be lifted above the truth by that.
    best.extra = std::max(0.0, best.extra * (1 - 1e-9));
    return best;
}

}  // namespace rekindle
