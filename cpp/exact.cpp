#include "exact.h"

#include <algorithm>
#include <bit>
#include <queue>

#include "simulate.h"

namespace rekindle {

namespace {

constexpr std::size_t idx(Id i) { return static_cast<std::size_t>(i); }
using State = std::uint32_t;

struct Step {
    State reads, makes, once;  // `once`: the bit of this op if it may run only once
    State pinned;              // values that may not be dropped once this op has run
    std::int64_t fresh;        // outputs and workspace
    std::int64_t cost;
    std::vector<std::pair<State, State>> inplace;  // input bit, output bit
};

}  // namespace

int exact_bits(const Problem& p) {
    int bits = 0;
    for (Id v = 0; v < p.num_values(); ++v) bits += p.producer_of(v) >= 0;
    for (Id i = 0; i < p.num_ops(); ++i) bits += p.is_once(i);
    // A held value made again has two copies, which a state does not tell apart. That pays only
    // for the other outputs of its producer.
    for (Id v : p.held)
        if (p.outputs[p.producer_of(v)].size() > 1) return too_many_bits;
    return bits;
}

Exact solve_exact(const Problem& p, std::int64_t budget, Control& control) {
    Exact answer;
    const int bits = exact_bits(p);
    if (bits > max_exact_bits) return answer;
    std::vector<State> bit_of(idx(p.num_values()), 0);
    std::vector<std::int64_t> size_of_bit;
    State next_bit = 1;
    for (Id v = 0; v < p.num_values(); ++v)
        if (p.producer_of(v) >= 0) {
            bit_of[idx(v)] = next_bit;
            size_of_bit.push_back(p.size_of(v));
            next_bit <<= 1U;
        }
    const State all_values = next_bit - 1;
    auto set_of = [&](std::span<const Id> values) {
        State set = 0;
        for (Id v : values) set |= bit_of[idx(v)];
        return set;
    };
    State goal = set_of(p.targets), held = set_of(p.held), loss_bit = 0;
    std::vector<Step> steps(idx(p.num_ops()));
    for (Id i = 0; i < p.num_ops(); ++i) {
        Step& s = steps[idx(i)];
        s.reads = set_of(p.inputs[i]);
        s.makes = set_of(p.outputs[i]);
        s.once = 0;
        if (p.is_once(i)) {
            s.once = next_bit;
            goal |= next_bit;
            next_bit <<= 1U;
        }
        if (i == p.loss) loss_bit = s.once;
        s.fresh = p.workspace[idx(i)];
        s.cost = p.cost_of(i);
        const auto pairs = p.inplace[i];
        for (std::size_t k = 0; k < pairs.size(); k += 2)
            s.inplace.emplace_back(bit_of[idx(pairs[k])], bit_of[idx(pairs[k + 1])]);
    }
    auto bytes = [&](State set) {
        std::int64_t sum = 0;
        for (set &= all_values; set != 0; set &= set - 1)
            sum += size_of_bit[static_cast<std::size_t>(std::countr_zero(set))];
        return sum;
    };

    // Distances and how each state was reached: an op, or -2 for a drop.
    constexpr std::int64_t far = -1;
    const std::size_t num_states = std::size_t{1} << static_cast<unsigned>(bits);
    std::vector<std::int64_t> distance(num_states, far);
    std::vector<State> from(num_states, 0);
    std::vector<Id> by(num_states, -1);
    using Item = std::pair<std::int64_t, State>;
    std::priority_queue<Item, std::vector<Item>, std::greater<>> queue;
    auto reach = [&](State state, std::int64_t cost, State previous, Id op) {
        if (distance[state] != far && distance[state] <= cost) return;
        distance[state] = cost;
        from[state] = previous;
        by[state] = op;
        queue.emplace(cost, state);
    };
    reach(0, 0, 0, -1);
    std::int64_t count = 0;
    State end = 0;
    bool found = false;
    while (!queue.empty()) {
        if ((++count & 1023) == 0 && control.expired()) return answer;
        const auto [cost, state] = queue.top();
        queue.pop();
        if (cost != distance[state]) continue;
        if ((state & goal) == goal) {
            found = true;
            end = state;
            break;
        }
        const State pinned = (loss_bit != 0 && (state & loss_bit) != 0) ? held : 0;
        for (State rest = state & all_values & ~pinned; rest != 0; rest &= rest - 1)
            reach(state & ~(rest & (~rest + 1)), cost, state, -2);
        const std::int64_t live = bytes(state);
        for (Id i = 0; i < p.num_ops(); ++i) {
            const Step& s = steps[idx(i)];
            if ((state & s.reads) != s.reads || (s.once & state) != 0) continue;
            // Making again what is live is never needed; it only costs.
            if ((s.makes & ~state) == 0) continue;
            const std::int64_t need = live + bytes(s.makes & ~state) + s.fresh;
            const State after = state | s.makes | s.once;
            if (need <= budget) reach(after, cost + s.cost, state, i);
            // Each subset of the in-place inputs may go with the step.
            const std::size_t subsets = std::size_t{1} << s.inplace.size();
            for (std::size_t k = 1; k < subsets; ++k) {
                State gone = 0;
                std::int64_t saved = 0;
                bool allowed = true;
                for (std::size_t j = 0; j < s.inplace.size(); ++j) {
                    if (((k >> j) & 1U) == 0) continue;
                    const auto [in, out] = s.inplace[j];
                    const State kept = pinned | (i == p.loss ? held : 0);
                    allowed = allowed && (kept & in) == 0;
                    gone |= in;
                    saved += bytes(out);
                }
                if (allowed && need - saved <= budget)
                    reach(after & ~gone, cost + s.cost, state, i);
            }
        }
    }
    answer.finished = true;
    answer.feasible = found;
    for (State state = end; found && by[state] != -1; state = from[state])
        if (by[state] >= 0) answer.schedule.push_back(by[state]);
    std::reverse(answer.schedule.begin(), answer.schedule.end());
    return answer;
}

}  // namespace rekindle
