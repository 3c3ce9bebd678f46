// A* of exact.h over states of at most 64 bits: one for each value, one for each run-once op.
#include "search/exact.h"

#include <algorithm>
#include <bit>
#include <queue>
#include <tuple>
#include <unordered_map>

#include "core/simulate.h"

namespace rekindle {

namespace {

using State = std::uint64_t;

struct Step {
    State reads = 0, makes = 0, once = 0;  // `once`: the bit of this op if it may run only once
    std::int64_t workspace = 0, cost = 0;
    std::vector<std::pair<State, State>> inplace;  // input bit, output bit
};

constexpr std::size_t most_reaches = 8;  // of a state; most are reached in a few ways

struct Mix {
    std::size_t operator()(State x) const {
        x = (x ^ (x >> 31)) * 0x9e3779b97f4a7c15ULL;
        return static_cast<std::size_t>(x ^ (x >> 29));
    }
};

class Search {
   public:
    Search(const Problem& problem, std::int64_t budget, const ExactLimits& limits)
        : p_(problem), budget_(budget), limits_(limits), steps_(idx(problem.num_ops())) {
        std::vector<State> bit_of(idx(p_.num_values()), 0);
        int bit = 0;
        for (Id v = 0; v < p_.num_values(); ++v)
            if (p_.producer_of(v) >= 0) {
                bit_of[idx(v)] = State{1} << bit++;
                size_.push_back(p_.size_of(v));
            }
        auto set_of = [&](std::span<const Id> values) {
            State set = 0;
            for (Id v : values) set |= bit_of[idx(v)];
            return set;
        };
        values_ = bit == 64 ? ~State{0} : (State{1} << bit) - 1;
        goal_ = set_of(p_.targets);
        held_ = set_of(p_.held);
        for (Id i = 0; i < p_.num_ops(); ++i) {
            Step& s = steps_[idx(i)];
            s.reads = set_of(p_.inputs[i]);
            s.makes = set_of(p_.outputs[i]);
            if (p_.is_once(i)) goal_ |= s.once = State{1} << bit++;
            if (i == p_.loss) loss_ = s.once;
            s.workspace = p_.workspace[idx(i)];
            s.cost = p_.cost_of(i);
            const auto pairs = p_.inplace[i];
            for (std::size_t k = 0; k < pairs.size(); k += 2)
                s.inplace.emplace_back(bit_of[idx(pairs[k])], bit_of[idx(pairs[k + 1])]);
        }
    }

    ExactResult run(Control& control) {
        ExactResult answer;
        reach(0, 0, 0, -1);
        while (!queue_.empty()) {
            if ((++count_ & 255) == 0 && control.expired()) return answer;
            if (nodes_.size() > limits_.max_states || too_many()) return answer;
            const auto [total, minus_cost, at] = queue_.top();
            queue_.pop();
            const Node node = nodes_[at];
            if (node.closed || -minus_cost != node.cost) continue;
            nodes_[at].closed = true;
            if ((node.state & goal_) == goal_) {
                answer.finished = answer.feasible = true;
                for (const Node* n = &nodes_[at]; n->op >= 0; n = &nodes_[n->from])
                    answer.schedule.push_back(n->op);
                std::reverse(answer.schedule.begin(), answer.schedule.end());
                return answer;
            }
            for (Id i = 0; i < p_.num_ops(); ++i) expand(node, at, i);
        }
        answer.finished = !too_many();
        return answer;
    }

   private:
    struct Node {
        State state;
        std::int64_t cost;
        std::size_t from;  // the node before; of the first, itself
        Id op;             // that led here; of the first, -1
        bool closed;
    };
    struct Drop {
        State bit;
        std::int64_t saves;
    };

    bool too_many() const { return reached_ > most_reaches * limits_.max_states; }

    std::int64_t bytes(State set) const {
        std::int64_t sum = 0;
        for (set &= values_; set != 0; set &= set - 1)
            sum += size_[static_cast<std::size_t>(std::countr_zero(set))];
        return sum;
    }

    // The heuristic of A*: never above the truth, and it falls by no more than a step costs.
    // The cost of what must still run. Ops are listed after what they read.
    std::int64_t remainder(State state) const {
        State missing = goal_ & ~state;
        std::int64_t cost = 0;
        for (std::size_t i = steps_.size(); i-- > 0;) {
            const Step& s = steps_[i];
            if (((s.makes | s.once) & missing) == 0) continue;
            cost += s.cost;
            missing |= s.reads & ~state;
        }
        return cost;
    }

    void reach(State state, std::int64_t cost, std::size_t from, Id op) {
        ++reached_;
        const auto known = known_.find(state);
        if (known != known_.end() && nodes_[known->second].cost <= cost) return;
        const std::int64_t total = cost + remainder(state);
        if (limits_.below >= 0 && total >= limits_.below) return;
        std::size_t at = nodes_.size();
        if (known == known_.end()) {
            known_.emplace(state, at);
            nodes_.push_back({state, cost, from, op, false});
        } else {
            at = known->second;
            nodes_[at].cost = cost;
            nodes_[at].from = from;
            nodes_[at].op = op;
        }
        // Among equal totals the dearest first: it is the nearest to a goal. Old entries of a node
        // stay in the queue and are known by their cost (`run`).
        queue_.emplace(total, -cost, at);
    }

    void expand(const Node& node, std::size_t at, Id i) {
        const Step& s = steps_[idx(i)];
        const State state = node.state;
        if ((state & s.reads) != s.reads || (s.once & state) != 0) return;
        // Recomputing what is live is never needed; it only costs.
        if (((s.makes | s.once) & ~state) == 0) return;
        const std::int64_t lacking = bytes(state | s.makes) + s.workspace - budget_;
        after_ = state | s.makes | s.once;
        cost_ = node.cost + s.cost;
        from_ = at;
        op_ = i;
        if (lacking <= 0) {
            reach(after_, cost_, from_, op_);
            return;
        }
        State pinned = (loss_ != 0 && (state & loss_) != 0) ? held_ : 0;
        if (i == p_.loss) pinned |= held_;
        drops_.clear();
        State rest = state & values_ & ~pinned & ~s.reads & ~s.makes;
        for (; rest != 0; rest &= rest - 1) {
            const State bit = rest & (~rest + 1);
            // What has no bytes makes no room; dropping it could only hurt.
            if (bytes(bit) > 0) drops_.push_back({bit, bytes(bit)});
        }
        for (const auto& [in, out] : s.inplace)
            if ((in & pinned) == 0 && bytes(out) > 0) drops_.push_back({in, bytes(out)});
        std::sort(drops_.begin(), drops_.end(),
                  [](const Drop& a, const Drop& b) { return a.saves > b.saves; });
        left_.assign(drops_.size() + 1, 0);
        for (std::size_t k = drops_.size(); k-- > 0;) left_[k] = left_[k + 1] + drops_[k].saves;
        drop_from(0, 0, lacking);
    }

    // Adds every smallest set of drops from the k-th on that saves what is lacking. They come in
    // falling order of what they save, so a set is smallest if it lacked something before the last.
    void drop_from(std::size_t k, State gone, std::int64_t lacking) {
        if (too_many()) return;
        if (lacking <= 0) {
            reach(after_ & ~gone, cost_, from_, op_);
            return;
        }
        for (; k < drops_.size() && left_[k] >= lacking; ++k)
            drop_from(k + 1, gone | drops_[k].bit, lacking - drops_[k].saves);
    }

    const Problem& p_;
    std::int64_t budget_;
    ExactLimits limits_;
    std::vector<Step> steps_;
    std::vector<std::int64_t> size_;  // per bit of a value
    State values_ = 0, goal_ = 0, held_ = 0, loss_ = 0;

    std::vector<Node> nodes_;
    std::unordered_map<State, std::size_t, Mix> known_;
    using Item = std::tuple<std::int64_t, std::int64_t, std::size_t>;  // total, -cost, node
    std::priority_queue<Item, std::vector<Item>, std::greater<>> queue_;
    std::int64_t count_ = 0;
    std::size_t reached_ = 0;

    // The step that is being expanded.
    std::vector<Drop> drops_;
    std::vector<std::int64_t> left_;  // what all drops from the k-th on save
    State after_ = 0;
    std::int64_t cost_ = 0;
    std::size_t from_ = 0;
    Id op_ = -1;
};

}  // namespace

int exact_bits(const Problem& p) {
    int bits = 0;
    for (Id v = 0; v < p.num_values(); ++v) bits += p.producer_of(v) >= 0;
    for (Id i = 0; i < p.num_ops(); ++i) bits += p.is_once(i);
    // A held value that is recomputed has two copies, which a state does not tell apart. That pays
    // only for the other outputs of its producer.
    for (Id v : p.held)
        if (p.outputs[p.producer_of(v)].size() > 1) return too_many_bits;
    return bits;
}

ExactResult solve_exact(const Problem& p, std::int64_t budget, const ExactLimits& limits,
                        Control& control) {
    if (exact_bits(p) > max_exact_bits) return {};
    return Search(p, budget, limits).run(control);
}

}  // namespace rekindle
