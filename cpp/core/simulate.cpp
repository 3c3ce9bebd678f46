// What a schedule means. Every other account of memory (anneal/timeline.h, the reference in Python
// of the tests) is checked against this one, and every solver's answer is simulated before it is
// believed.
//
// First pass: validity, and the copies of each value with their last use. Second: memory per step.
#include "core/simulate.h"

#include <algorithm>
#include <utility>

namespace rekindle {

Trace simulate(const Problem& p, std::span<const Id> schedule) {
    Trace trace;
    const std::size_t num_steps = schedule.size();
    trace.runs.assign(idx(p.num_ops()), 0);
    std::vector<Copy> copies;
    copies.reserve(num_steps + num_steps / 2);
    constexpr std::size_t none = static_cast<std::size_t>(-1);
    std::vector<std::size_t> current(idx(p.num_values()), none);
    std::vector<std::size_t> inplace_reads;  // the copies that inplace inputs read, step by step

    auto fail = [&](Fault fault, std::size_t step, Id op, Id value) -> Trace& {
        trace.fault = fault;
        trace.step = static_cast<std::int64_t>(step);
        trace.op = op;
        trace.value = value;
        return trace;
    };

    for (std::size_t t = 0; t < num_steps; ++t) {
        const Id i = schedule[t];
        if (i < 0 || i >= p.num_ops()) return fail(Fault::no_such_op, t, i, -1);
        for (Id v : p.inputs[i]) {
            const std::size_t c = current[idx(v)];
            if (c == none) return fail(Fault::not_produced, t, i, v);
            copies[c].last = std::max(copies[c].last, t);
        }
        const auto pairs = p.inplace[i];
        for (std::size_t k = 0; k < pairs.size(); k += 2) {
            const std::size_t c = current[idx(pairs[k])];
            if (c == none) return fail(Fault::not_produced, t, i, pairs[k]);
            inplace_reads.push_back(c);
        }
        if (i == p.loss)
            for (Id v : p.held) {
                const std::size_t c = current[idx(v)];
                if (c == none) return fail(Fault::not_produced, t, i, v);
                copies[c].last = num_steps;
            }
        for (Id v : p.outputs[i]) {
            current[idx(v)] = copies.size();
            copies.push_back({t, t, v});
        }
        ++trace.runs[idx(i)];
    }
    for (Id i = 0; i < p.num_ops(); ++i)
        if (p.is_once(i) && trace.runs[idx(i)] != 1) {
            trace.times = trace.runs[idx(i)];
            return fail(Fault::once_broken, num_steps, i, -1);
        }
    for (Id v : p.targets) {
        if (current[idx(v)] == none) return fail(Fault::output_missing, num_steps, -1, v);
        copies[current[idx(v)]].last = num_steps;
    }

    // Differences modulo 2^64: the running sum is never negative, so it comes out right.
    std::vector<std::uint64_t> delta(num_steps + 1, 0);
    for (const Copy& c : copies) {
        const auto size = static_cast<std::uint64_t>(p.size_of(c.value));
        delta[c.first] += size;
        // The last reader still has the value in memory; the step after it does not.
        if (c.last + 1 < num_steps) delta[c.last + 1] -= size;
    }
    trace.memory.resize(num_steps);
    std::uint64_t live = 0;
    std::size_t read = 0;
    for (std::size_t t = 0; t < num_steps; ++t) {
        live += delta[t];
        const Id i = schedule[t];
        std::uint64_t here = live + static_cast<std::uint64_t>(p.workspace[idx(i)]);
        const auto pairs = p.inplace[i];
        for (std::size_t k = 0; k < pairs.size(); k += 2, ++read)
            // The output takes the place of an input that nothing reads later; else it needs its
            // own.
            if (copies[inplace_reads[read]].last == t)
                here -= static_cast<std::uint64_t>(p.size_of(pairs[k + 1]));
        trace.memory[t] = here;
        if (here > trace.peak || trace.peak_step < 0) {
            trace.peak = here;
            trace.peak_step = static_cast<std::int64_t>(t);
        }
    }
    trace.copies = std::move(copies);
    return trace;
}

double total_cost(const Problem& p, std::span<const Id> schedule) {
    double sum = 0;
    for (Id i : schedule) sum += static_cast<double>(p.cost_of(i));
    return sum;
}

std::vector<Id> drop_dead_runs(const Problem& p, std::span<const Id> schedule) {
    // From the end: needed is what a later step reads before it is made again. A run goes only with
    // all of its outputs, so what it read is then needed by one reader less, and may go in turn.
    std::vector<std::uint8_t> needed(idx(p.num_values()), 0);
    for (Id v : p.targets) needed[idx(v)] = 1;
    std::vector<Id> kept;
    kept.reserve(schedule.size());
    for (std::size_t t = schedule.size(); t-- > 0;) {
        const Id i = schedule[t];
        bool keep = p.is_once(i);
        for (Id v : p.outputs[i]) keep = keep || needed[idx(v)];
        if (!keep) continue;
        kept.push_back(i);
        for (Id v : p.outputs[i]) needed[idx(v)] = 0;
        for (Id v : p.inputs[i]) needed[idx(v)] = 1;
    }
    std::reverse(kept.begin(), kept.end());
    return kept;
}

}  // namespace rekindle
