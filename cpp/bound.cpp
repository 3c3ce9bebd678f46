#include "bound.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace rekindle {

namespace {

constexpr std::size_t idx(Id i) { return static_cast<std::size_t>(i); }
constexpr std::int64_t infinite = std::numeric_limits<std::int64_t>::max() / 4;

// Maximum flow by Dinic's algorithm with whole capacities.
class Flow {
   public:
    // Levels exist from the start: `run` may end at once, by the clock, and `reached` is asked all the
    // same.
    explicit Flow(std::size_t num_nodes) : head_(num_nodes, -1), level_(num_nodes, -1) {}

    void clear() {
        std::fill(head_.begin(), head_.end(), -1);
        edges_.clear();
    }

    void edge(std::int32_t from, std::int32_t to, std::int64_t capacity) {
        edges_.push_back({to, head_[idx(from)], capacity});
        head_[idx(from)] = static_cast<std::int32_t>(edges_.size()) - 1;
        edges_.push_back({from, head_[idx(to)], 0});
        head_[idx(to)] = static_cast<std::int32_t>(edges_.size()) - 1;
    }

    std::int64_t run(std::int32_t source, std::int32_t sink, Control& control) {
        std::int64_t total = 0;
        while (!control.expired() && levels(source, sink)) {
            next_ = head_;
            while (const std::int64_t sent = augment(source, sink)) total += sent;
        }
        return total;
    }

    // After run: whether the node is on the source's side of the minimum cut.
    bool reached(std::int32_t node) const { return level_[idx(node)] >= 0; }

   private:
    struct Edge {
        std::int32_t to, next;
        std::int64_t capacity;
    };

    bool levels(std::int32_t source, std::int32_t sink) {
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
    std::int64_t augment(std::int32_t source, std::int32_t sink) {
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
            const std::int32_t back = path_.back();
            path_.pop_back();
            node = edges_[idx(back ^ 1)].to;
            next_[idx(node)] = edges_[idx(next_[idx(node)])].next;
        }
        std::int64_t amount = infinite;
        for (std::int32_t e : path_) amount = std::min(amount, edges_[idx(e)].capacity);
        for (std::int32_t e : path_) {
            edges_[idx(e)].capacity -= amount;
            edges_[idx(e ^ 1)].capacity += amount;
        }
        return amount;
    }

    std::vector<std::int32_t> head_, next_, level_, queue_, path_;
    std::vector<Edge> edges_;
};

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

}  // namespace

Bound bound_at(const Problem& p, Id op, std::int64_t budget, Control& control) {
    Bound best;
    const auto before = ancestors(p, op);
    const auto after = descendants(p, op);

    // What k itself has in memory is there for free.
    std::vector<std::uint8_t> free(idx(p.num_values()), 0);
    std::int64_t own = p.workspace[idx(op)];
    for (const auto& row : {p.inputs[op], p.outputs[op]})
        for (Id v : row) {
            free[idx(v)] = 1;
            own += p.size_of(v);
        }
    const auto pairs = p.inplace[op];
    for (std::size_t k = 1; k < pairs.size(); k += 2) own -= p.size_of(pairs[k]);
    const std::int64_t room = budget - own;
    if (room < 0) {
        best.infeasible = true;
        return best;
    }

    // The part of the graph that descendants can ask for: values, and the ops that make them.
    std::vector<std::uint8_t> asked(idx(p.num_values()), 0);
    std::vector<Id> values, needed;
    auto ask = [&](Id v) {
        if (asked[idx(v)] || free[idx(v)] || after[idx(p.producer_of(v))]) return;
        asked[idx(v)] = 1;
        values.push_back(v);
    };
    for (Id i = 0; i < p.num_ops(); ++i)
        if (after[idx(i)])
            for (Id v : p.inputs[i]) ask(v);
    // A target that an ancestor makes must be there at the end as well.
    for (Id v : p.targets)
        if (before[idx(p.producer_of(v))]) ask(v);
    needed = values;
    for (std::size_t k = 0; k < values.size(); ++k) {
        const Id producer = p.producer_of(values[k]);
        if (!(before[idx(producer)] && p.is_once(producer)))
            for (Id v : p.inputs[producer]) ask(v);
    }
    if (values.empty()) return best;

    std::vector<std::int32_t> value_node(idx(p.num_values()), -1), op_node(idx(p.num_ops()), -1);
    std::int32_t num_nodes = 2;
    double total_cost = 0, total_size = 0;
    for (Id v : values) {
        value_node[idx(v)] = num_nodes;
        num_nodes += 2;
        total_size += static_cast<double>(p.size_of(v));
        const Id producer = p.producer_of(v);
        if (op_node[idx(producer)] < 0) {
            op_node[idx(producer)] = num_nodes++;
            if (before[idx(producer)]) total_cost += static_cast<double>(p.cost_of(producer));
        }
    }
    if (total_size <= static_cast<double>(room)) return best;  // everything fits

    // Costs are scaled so that whole capacities lose nothing that matters.
    const double scale = std::max(1.0, 1e15 / std::max(1.0, total_cost));
    Flow flow(static_cast<std::size_t>(num_nodes));
    auto evaluate = [&](double price, double& kept_size) {
        flow.clear();
        for (Id v : needed) flow.edge(0, value_node[idx(v)], infinite);
        for (Id v : values) {
            const std::int32_t node = value_node[idx(v)];
            const double keep = std::floor(price * scale * static_cast<double>(p.size_of(v)));
            flow.edge(node, node + 1, static_cast<std::int64_t>(std::min(keep, 4e18 / 2)));
            flow.edge(node + 1, op_node[idx(p.producer_of(v))], infinite);
        }
        for (Id i = 0; i < p.num_ops(); ++i) {
            if (op_node[idx(i)] < 0) continue;
            const bool again = before[idx(i)] != 0;  // others may run for the first time
            const std::int64_t cost =
                !again ? 0
                : p.is_once(i)
                    ? infinite
                    : static_cast<std::int64_t>(
                          std::floor(scale * static_cast<double>(p.cost_of(i))));
            flow.edge(op_node[idx(i)], 1, cost);
            if (again && p.is_once(i)) continue;
            for (Id v : p.inputs[i])
                if (value_node[idx(v)] >= 0)
                    flow.edge(op_node[idx(i)], value_node[idx(v)], infinite);
        }
        const double cut = static_cast<double>(flow.run(0, 1, control)) / scale;
        kept_size = 0;
        for (Id v : values)
            if (flow.reached(value_node[idx(v)]) && !flow.reached(value_node[idx(v)] + 1))
                kept_size += static_cast<double>(p.size_of(v));
        return cut - price * static_cast<double>(room);
    };

    // The bound is concave in the price; its slope is what is kept less the room.
    double low = 0, high = 2.0 * total_cost / std::max(1.0, static_cast<double>(room)) + 1e-12;
    for (int round = 0; round < 40 && !control.expired(); ++round) {
        const double price = round == 0 ? high : (low + high) / 2;
        double kept_size = 0;
        const double extra = evaluate(price, kept_size);
        if (control.expired()) break;
        if (extra > best.extra) {
            best.extra = extra;
            best.price = price;
            best.kept.clear();
            for (Id v : values)
                if (flow.reached(value_node[idx(v)]) && !flow.reached(value_node[idx(v)] + 1))
                    best.kept.push_back(v);
        }
        if (kept_size > static_cast<double>(room)) {
            low = price;
            if (round == 0) high *= 8;  // the price was still too low
            if (round == 0) round = -1;
            if (high > 1e30) {
                best.infeasible = false;
                break;
            }
        } else {
            high = price;
        }
        if (high - low < 1e-4 * high) break;
    }
    best.extra = std::max(0.0, best.extra * (1 - 1e-9));
    return best;
}

}  // namespace rekindle
