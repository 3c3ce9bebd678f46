// What a schedule means. Every other account of memory (anneal/timeline.h, the reference in Python
// of the tests) is checked against this one, and every solver's answer is simulated before it is
// used.
//
// First pass: validity, and the copies of each value with their last use. Second: memory per step.
#include "core/simulate.h"

#include <algorithm>
#include <utility>

namespace rekindle {

namespace {

constexpr std::size_t kNone = static_cast<std::size_t>(-1);

// Differences modulo 2^64: the running sum is never negative, so it comes out right.
class Alive {
   public:
    explicit Alive(std::size_t num_steps) : delta_(num_steps + 1, 0) {}

    // Alive from step `first` to step `last`, both included.
    void add(std::size_t first, std::size_t last, std::int64_t size) {
        delta_[first] += static_cast<std::uint64_t>(size);
        if (last + 1 < delta_.size() - 1) delta_[last + 1] -= static_cast<std::uint64_t>(size);
    }
    std::uint64_t change(std::size_t step) const { return delta_[step]; }

   private:
    std::vector<std::uint64_t> delta_;
};

// `Moves`: whether the schedule has transfers. A constant, so that one without them pays nothing
// for what they need to be followed.
template <bool Moves>
class Walk {
   public:
    Walk(const Problem& p, std::span<const Id> schedule, std::span<const Transfer> transfers)
        : p_(p), schedule_(schedule), transfers_(transfers) {}

    Trace run() {
        trace_.runs.assign(idx(p_.num_ops()), 0);
        copies_.reserve(num_steps_ + num_steps_ / 2);
        current_.assign(idx(p_.num_values()), kNone);
        if (!p_.pins.ids.empty()) step_of_.assign(idx(p_.num_ops()), 0);
        if constexpr (Moves) {
            sent_.assign(idx(p_.num_values()), kNone);
            host_.assign(idx(p_.num_values()), kNone);
            if (!in_order()) return std::move(trace_);
        }
        for (std::size_t t = 0; t < num_steps_; ++t)
            if (!(at_transfer(t) ? transfer_step(t, transfers_[next_++])
                                 : op_step(t, schedule_[t - next_])))
                return std::move(trace_);
        if (at_end()) account();
        return std::move(trace_);
    }

   private:
    bool at_transfer(std::size_t t) const {
        if constexpr (Moves)
            return next_ < transfers_.size() && transfers_[next_].before == t - next_;
        else
            return false;
    }

    // Without it steps would be taken from beyond the end of the ops.
    bool in_order() {
        std::size_t place = 0;
        for (const Transfer& transfer : transfers_) {
            if (transfer.before < place || transfer.before > schedule_.size())
                return fail(Fault::misplaced, transfer.before, -1, transfer.value);
            place = transfer.before;
        }
        return true;
    }

    bool fail(Fault fault, std::size_t step, Id op, Id value) {
        trace_.fault = fault;
        trace_.step = static_cast<std::int64_t>(step);
        trace_.op = op;
        trace_.value = value;
        return false;
    }

    bool op_step(std::size_t t, Id i) {
        if (i < 0 || i >= p_.num_ops()) return fail(Fault::no_such_op, t, i, -1);
        for (Id v : p_.inputs[i]) {
            const std::size_t c = current_[idx(v)];
            if (c == kNone) return fail(Fault::not_produced, t, i, v);
            copies_[c].last = std::max(copies_[c].last, t);
        }
        const auto pairs = p_.inplace[i];
        for (std::size_t k = 0; k < pairs.size(); k += 2) {
            const std::size_t c = current_[idx(pairs[k])];
            if (c == kNone) return fail(Fault::not_produced, t, i, pairs[k]);
            inplace_reads_.push_back(c);
        }
        if (i == p_.loss)
            for (Id v : p_.held) {
                const std::size_t c = current_[idx(v)];
                if (c == kNone) return fail(Fault::not_produced, t, i, v);
                copies_[c].last = num_steps_;
            }
        if (!p_.pins.ids.empty()) {
            const auto pins = p_.pins[i];
            // Inputs of the op, so their copies are there.
            for (std::size_t k = 0; k < pins.size(); k += 2)
                pinned_.push_back({current_[idx(pins[k])], pins[k + 1]});
            step_of_[idx(i)] = t;
        }
        for (Id v : p_.outputs[i])
            if (!make(t, v)) return false;
        ++trace_.runs[idx(i)];
        return true;
    }

    bool make(std::size_t t, Id v) {
        if constexpr (Moves)
            // What replaces the copy may be written where the transfer still reads.
            if (undropped(v)) return fail(Fault::not_dropped, t, -1, v);
        current_[idx(v)] = copies_.size();
        copies_.push_back({t, t, v});
        return true;
    }

    // Whether the newest copy of the value was sent, and neither dropped nor known to live on.
    bool undropped(Id v) const {
        const std::size_t c = current_[idx(v)];
        return c != kNone && sent_[idx(v)] == c && copies_[c].last < num_steps_;
    }

    bool transfer_step(std::size_t t, const Transfer& transfer) {
        const Id v = transfer.value;
        if (!p_.link) return fail(Fault::no_link, t, -1, v);
        if (v < 0 || v >= p_.num_values() || p_.resident[idx(v)] || p_.size_of(v) < p_.link->least)
            return fail(Fault::not_movable, t, -1, v);
        const std::size_t c = current_[idx(v)];
        switch (transfer.kind) {
            case Transfer::Kind::send:
                if (c == kNone) return fail(Fault::not_on_device, t, -1, v);
                if (host_[idx(v)] != kNone) return fail(Fault::on_host, t, -1, v);
                copies_[c].last = std::max(copies_[c].last, t);
                sent_[idx(v)] = c;
                host_[idx(v)] = host_copies_.size();
                host_copies_.push_back({t, num_steps_, v});
                return true;
            case Transfer::Kind::drop:
                if (c == kNone || sent_[idx(v)] != c) return fail(Fault::not_sent, t, -1, v);
                copies_[c].last = std::max(copies_[c].last, t);
                current_[idx(v)] = kNone;
                return true;
            case Transfer::Kind::fetch:
                if (host_[idx(v)] == kNone) return fail(Fault::not_on_host, t, -1, v);
                fetched_.push_back(copies_.size());
                return make(t, v);
            case Transfer::Kind::release:
                if (host_[idx(v)] == kNone) return fail(Fault::not_on_host, t, -1, v);
                host_copies_[host_[idx(v)]].last = t;
                host_[idx(v)] = kNone;
                return true;
        }
        return fail(Fault::not_movable, t, -1, v);
    }

    // What can only be said of the whole schedule.
    bool at_end() {
        for (Id i = 0; i < p_.num_ops(); ++i)
            if (p_.is_once(i) && trace_.runs[idx(i)] != 1) {
                trace_.times = trace_.runs[idx(i)];
                return fail(Fault::once_broken, num_steps_, i, -1);
            }
        for (Id v : p_.targets) {
            if (current_[idx(v)] == kNone) return fail(Fault::output_missing, num_steps_, -1, v);
            copies_[current_[idx(v)]].last = num_steps_;
        }
        // Ops that pin, and those until which they do, run once: there is one step of each.
        for (const auto& [copy, until] : pinned_)
            copies_[copy].last = std::max(copies_[copy].last, step_of_[idx(until)]);
        if constexpr (Moves) {
            for (const Copy& c : host_copies_)
                if (undropped(c.value)) return fail(Fault::not_dropped, num_steps_, -1, c.value);
            // A reader or a send of its own comes after the step that makes a copy.
            for (std::size_t c : fetched_)
                if (copies_[c].last == copies_[c].first)
                    return fail(Fault::not_read, copies_[c].first, -1, copies_[c].value);
            return host_account();
        }
        return true;
    }

    bool host_account() {
        Alive alive(num_steps_);
        for (const Copy& c : host_copies_) alive.add(c.first, c.last, p_.size_of(c.value));
        trace_.host_memory.resize(num_steps_);
        std::uint64_t live = 0;
        for (std::size_t t = 0; t < num_steps_; ++t) {
            trace_.host_memory[t] = live += alive.change(t);
            if (p_.link && p_.link->host_budget &&
                live > static_cast<std::uint64_t>(*p_.link->host_budget)) {
                trace_.host_peak = live;  // for the sentence that says so
                return fail(Fault::host_budget, t, -1, -1);
            }
            trace_.host_peak = std::max(trace_.host_peak, live);
        }
        return true;
    }

    void account() {
        Alive alive(num_steps_);
        for (const Copy& c : copies_)
            // The last reader still has the value in memory; the step after it does not.
            alive.add(c.first, c.last, p_.size_of(c.value));
        trace_.memory.resize(num_steps_);
        std::uint64_t live = 0;
        std::size_t read = 0;
        next_ = 0;
        for (std::size_t t = 0; t < num_steps_; ++t) {
            live += alive.change(t);
            std::uint64_t here = live;
            if (at_transfer(t)) {
                ++next_;  // the copy it makes is counted; there is no workspace
            } else {
                const Id i = schedule_[t - next_];
                here += static_cast<std::uint64_t>(p_.workspace[idx(i)]);
                const auto pairs = p_.inplace[i];
                for (std::size_t k = 0; k < pairs.size(); k += 2, ++read)
                    // The output takes the place of an input that nothing reads later; else it
                    // needs its own.
                    if (copies_[inplace_reads_[read]].last == t)
                        here -= static_cast<std::uint64_t>(p_.size_of(pairs[k + 1]));
            }
            trace_.memory[t] = here;
            if (here > trace_.peak || trace_.peak_step < 0) {
                trace_.peak = here;
                trace_.peak_step = static_cast<std::int64_t>(t);
            }
        }
        trace_.copies = std::move(copies_);
    }

    const Problem& p_;
    std::span<const Id> schedule_;
    std::span<const Transfer> transfers_;
    const std::size_t num_steps_ = schedule_.size() + transfers_.size();
    std::size_t next_ = 0;  // the transfer to come; step t is op t - next_ where none stands there
    Trace trace_;
    std::vector<Copy> copies_;
    std::vector<std::size_t> current_;        // per value: its newest copy on the device
    std::vector<std::size_t> inplace_reads_;  // the copies that inplace inputs read, step by step
    // With pins alone: copies, each with the op until which it lives; and per op its newest step.
    std::vector<std::pair<std::size_t, Id>> pinned_;
    std::vector<std::size_t> step_of_;
    // With transfers alone:
    std::vector<std::size_t> sent_;  // per value: the copy that was sent last
    std::vector<std::size_t> host_;  // per value: its place in `host_copies_` while it is there
    std::vector<Copy> host_copies_;
    std::vector<std::size_t> fetched_;  // the copies that fetches make
};

}  // namespace

Trace simulate(const Problem& p, std::span<const Id> schedule,
               std::span<const Transfer> transfers) {
    if (transfers.empty()) return Walk<false>(p, schedule, {}).run();
    return Walk<true>(p, schedule, transfers).run();
}

double total_cost(const Problem& p, std::span<const Id> schedule) {
    double sum = 0;
    for (Id i : schedule) sum += static_cast<double>(p.cost_of(i));
    return sum;
}

std::vector<Id> drop_dead_runs(const Problem& p, std::span<const Id> schedule) {
    // From the end: needed is what a later step reads before it is recomputed. A run goes only with
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
