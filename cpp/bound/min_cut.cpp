// Dinic's algorithm, and the network of a save set.
//
// Network: node 0 is the source, 1 the sink. A value has two nodes: the first is on the source's
// side where the value is wanted, the second where it is wanted and not kept, so the edge between
// them costs what keeping costs. From there an unlimited edge leads to its producer, whose edge to
// the sink costs what running it again costs, and which wants its inputs in turn.
#include "bound/min_cut.h"

#include <algorithm>
#include <cmath>

namespace rekindle {

std::vector<std::uint8_t> ancestors(const Problem& p, Id op) {
    std::vector<std::uint8_t> is(idx(p.num_ops()), 0);
    std::vector<Id> todo{op};
    while (!todo.empty()) {
        const Id i = todo.back();
        todo.pop_back();
        for (Id v : p.inputs[i]) {
            const Id producer = p.producer_of(v);
            if (!is[idx(producer)]) {
                is[idx(producer)] = 1;
                todo.push_back(producer);
            }
        }
    }
    return is;
}

std::vector<std::uint8_t> descendants(const Problem& p, Id op) {
    std::vector<std::uint8_t> is(idx(p.num_ops()), 0);
    std::vector<Id> todo{op};
    while (!todo.empty()) {
        const Id i = todo.back();
        todo.pop_back();
        for (Id v : p.outputs[i])
            for (Id reader : p.readers[v])
                if (!is[idx(reader)]) {
                    is[idx(reader)] = 1;
                    todo.push_back(reader);
                }
    }
    return is;
}

void MaxFlow::clear() {
    std::fill(head_.begin(), head_.end(), -1);
    edges_.clear();
}

void MaxFlow::add_edge(std::int32_t from, std::int32_t to, std::int64_t capacity) {
    // Edge e and its reverse, e ^ 1, side by side.
    edges_.push_back({to, head_[idx(from)], capacity});
    head_[idx(from)] = static_cast<std::int32_t>(edges_.size()) - 1;
    edges_.push_back({from, head_[idx(to)], 0});
    head_[idx(to)] = static_cast<std::int32_t>(edges_.size()) - 1;
}

std::int64_t MaxFlow::run(std::int32_t source, std::int32_t sink, Control& control, bool host) {
    std::int64_t total = 0;
    // The last, failed search for levels is what `on_source_side` reads: what the source still
    // reaches in the residual network is the source's side of a minimum cut.
    while (!control.expired(host) && levels(source, sink)) {
        next_ = head_;
        while (const std::int64_t sent = augment(source, sink)) total += sent;
    }
    return total;
}

bool MaxFlow::levels(std::int32_t source, std::int32_t sink) {
    level_.assign(head_.size(), -1);
    queue_.clear();
    queue_.push_back(source);
    level_[idx(source)] = 0;
    for (std::size_t k = 0; k < queue_.size(); ++k)
        for (std::int32_t e = head_[idx(queue_[k])]; e >= 0; e = edges_[idx(e)].next)
            if (edges_[idx(e)].capacity > 0 && level_[idx(edges_[idx(e)].to)] < 0) {
                level_[idx(edges_[idx(e)].to)] = level_[idx(queue_[k])] + 1;
                queue_.push_back(edges_[idx(e)].to);
            }
    return level_[idx(sink)] >= 0;
}

// One augmenting path along the levels, without recursion (chains are deep).
std::int64_t MaxFlow::augment(std::int32_t source, std::int32_t sink) {
    path_.clear();
    std::int32_t node = source;
    while (node != sink) {
        std::int32_t& e = next_[idx(node)];
        while (e >= 0 && (edges_[idx(e)].capacity <= 0 ||
                          level_[idx(edges_[idx(e)].to)] != level_[idx(node)] + 1))
            e = edges_[idx(e)].next;
        if (e >= 0) {
            path_.push_back(e);
            node = edges_[idx(e)].to;
            continue;
        }
        if (path_.empty()) return 0;
        // A dead end: one step back, and past this edge for good (until the next levels).
        const std::int32_t back = path_.back();
        path_.pop_back();
        node = edges_[idx(back ^ 1)].to;
        next_[idx(node)] = edges_[idx(next_[idx(node)])].next;
    }
    std::int64_t amount = MaxFlow::infinite;
    for (std::int32_t e : path_) amount = std::min(amount, edges_[idx(e)].capacity);
    for (std::int32_t e : path_) {
        edges_[idx(e)].capacity -= amount;
        edges_[idx(e ^ 1)].capacity += amount;
    }
    return amount;
}

SaveSetCut::SaveSetCut(const Problem& problem, Id op)
    : p_(problem), before_(ancestors(problem, op)), flow_(0) {
    const auto after = descendants(p_, op);
    // What the op itself has in memory is there for free.
    std::vector<std::uint8_t> free(idx(p_.num_values()), 0);
    for (const auto& row : {p_.inputs[op], p_.outputs[op]})
        for (Id v : row) free[idx(v)] = 1;

    // The part of the graph that descendants can ask for: values, and the ops that make them.
    std::vector<std::uint8_t> asked(idx(p_.num_values()), 0);
    auto ask = [&](Id v) {
        if (asked[idx(v)] || free[idx(v)] || after[idx(p_.producer_of(v))]) return;
        asked[idx(v)] = 1;
        values_.push_back(v);
    };
    for (Id i = 0; i < p_.num_ops(); ++i)
        if (after[idx(i)])
            for (Id v : p_.inputs[i]) ask(v);
    // A target that an ancestor makes must be there at the end as well.
    for (Id v : p_.targets)
        if (before_[idx(p_.producer_of(v))]) ask(v);
    num_needed_ = values_.size();
    for (std::size_t k = 0; k < values_.size(); ++k) {
        const Id producer = p_.producer_of(values_[k]);
        if (!(before_[idx(producer)] && p_.is_once(producer)))
            for (Id v : p_.inputs[producer]) ask(v);
    }

    value_node_.assign(idx(p_.num_values()), -1);
    op_node_.assign(idx(p_.num_ops()), -1);
    std::int32_t num_nodes = 2;
    double total_cost = 0;
    for (Id v : values_) {
        value_node_[idx(v)] = num_nodes;
        num_nodes += 2;
        const Id producer = p_.producer_of(v);
        if (op_node_[idx(producer)] < 0) {
            op_node_[idx(producer)] = num_nodes++;
            if (before_[idx(producer)]) total_cost += static_cast<double>(p_.cost_of(producer));
        }
    }
    flow_ = MaxFlow(static_cast<std::size_t>(num_nodes));
    // Costs are scaled so that whole capacities lose nothing that matters, and that all of them
    // together stay below `infinite`: none is above `max_capacity_`.
    max_capacity_ = 1e18 / static_cast<double>(values_.size() + 1);
    scale_ = max_capacity_ / 8 / std::max(1.0, total_cost);
}

double SaveSetCut::cut(std::span<const double> keep_cost, Control& control, bool host) {
    flow_.clear();
    for (std::size_t k = 0; k < num_needed_; ++k)
        flow_.add_edge(0, value_node_[idx(values_[k])], MaxFlow::infinite);
    for (Id v : values_) {
        const std::int32_t node = value_node_[idx(v)];
        const double keep = std::min(std::floor(scale_ * keep_cost[idx(v)]), max_capacity_);
        flow_.add_edge(node, node + 1, static_cast<std::int64_t>(keep));
        flow_.add_edge(node + 1, op_node_[idx(p_.producer_of(v))], MaxFlow::infinite);
    }
    for (Id i = 0; i < p_.num_ops(); ++i) {
        if (op_node_[idx(i)] < 0) continue;
        const bool again = before_[idx(i)] != 0;  // others may run for the first time
        const std::int64_t cost =
            !again          ? 0
            : p_.is_once(i) ? MaxFlow::infinite
                            : static_cast<std::int64_t>(
                                  std::floor(scale_ * static_cast<double>(p_.cost_of(i))));
        flow_.add_edge(op_node_[idx(i)], 1, cost);
        if (again && p_.is_once(i)) continue;
        for (Id v : p_.inputs[i])
            if (value_node_[idx(v)] >= 0)
                flow_.add_edge(op_node_[idx(i)], value_node_[idx(v)], MaxFlow::infinite);
    }
    return static_cast<double>(flow_.run(0, 1, control, host)) / scale_;
}

std::vector<Id> SaveSetCut::kept() const {
    std::vector<Id> result;
    for (Id v : values_)
        if (flow_.on_source_side(value_node_[idx(v)]) &&
            !flow_.on_source_side(value_node_[idx(v)] + 1))
            result.push_back(v);
    return result;
}

}  // namespace rekindle
