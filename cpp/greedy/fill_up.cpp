// The replay of fill_up.h. A value that the sequence would free now goes into a queue instead, and
// out of it, lowest score first, only when room is needed. Entries are never searched for: what
// became of a value since is seen by its version.
#include "greedy/fill_up.h"

#include <algorithm>
#include <queue>
#include <tuple>

#include "core/simulate.h"
#include "greedy/recompute_cost.h"

namespace rekindle {

namespace {

constexpr std::int64_t never = -1;

class Replay {
   public:
    Replay(const Problem& problem, std::span<const Id> sequence, std::int64_t limit, Keep keep)
        : p(problem), sequence_(sequence), limit_(limit), keep_(keep), recompute_cost_(problem) {
        const auto num_values = idx(p.num_values());
        live_.assign(num_values, 0);
        held_.assign(num_values, 0);
        until_.assign(num_values, never);
        wanted_.assign(num_values, never);
        version_.assign(num_values, 0);
        queued_.assign(num_values, 0);
        look_ahead();
    }

    std::vector<Id> run(Control& control) {
        std::vector<Id> kept;
        kept.reserve(sequence_.size());
        for (now_ = 0; now_ < static_cast<std::int64_t>(sequence_.size()); ++now_) {
            const Id op = sequence_[static_cast<std::size_t>(now_)];
            // Out of time: the rest of the sequence stands as it was, which is valid.
            if ((now_ & 1023) == 0 && control.expired()) keep_all_ = true;
            if (keep_all_ || p.is_once(op) || missing(op)) {
                make_room(op);
                kept.push_back(op);
                if (op == p.loss)
                    for (Id v : p.held) held_[idx(v)] = 1;
                begin(op, true);
            } else {
                begin(op, false);
            }
            for (Id v : p.inputs[op]) release(v);
        }
        return kept;
    }

   private:
    // Per step and output: the last read of this copy, and the next run after it whose copy of the
    // same value is read.
    void look_ahead() {
        const auto num_values = idx(p.num_values());
        const auto end = static_cast<std::int64_t>(sequence_.size());
        start_.assign(sequence_.size() + 1, 0);
        for (std::size_t t = 0; t < sequence_.size(); ++t)
            start_[t + 1] = start_[t] + p.outputs[sequence_[t]].size();
        last_read_.assign(start_.back(), never);
        next_want_.assign(start_.back(), never);
        std::vector<std::int64_t> read(num_values, never), want(num_values, never);
        for (Id v : p.targets) read[idx(v)] = end;
        for (std::size_t t = sequence_.size(); t-- > 0;) {
            std::size_t k = start_[t];
            for (Id v : p.outputs[sequence_[t]]) {
                last_read_[k] = read[idx(v)];
                next_want_[k] = want[idx(v)];
                if (read[idx(v)] != never) want[idx(v)] = static_cast<std::int64_t>(t);
                read[idx(v)] = never;
                ++k;
            }
            for (Id v : p.inputs[sequence_[t]])
                read[idx(v)] = std::max(read[idx(v)], static_cast<std::int64_t>(t));
        }
    }

    // Whether this run makes something that is read and is not there.
    bool missing(Id op) const {
        std::size_t k = start_[static_cast<std::size_t>(now_)];
        for (Id v : p.outputs[op])
            if (last_read_[k++] != never && !live_[idx(v)]) return true;
        return false;
    }

    void make_room(Id op) {
        std::int64_t fresh = p.workspace[idx(op)];
        for (Id v : p.outputs[op]) {
            // A kept copy is replaced by the new one; a held copy stays beside it.
            if (live_[idx(v)] && !held_[idx(v)]) drop(v);
            fresh += p.size_of(v);
        }
        while (used_ + fresh > limit_ && evict_one()) {
        }
    }

    // The outputs of this step are (still) there and stay until their last read.
    void begin(Id op, bool made) {
        std::size_t k = start_[static_cast<std::size_t>(now_)];
        for (Id v : p.outputs[op]) {
            if (made && !live_[idx(v)]) {
                live_[idx(v)] = 1;
                used_ += p.size_of(v);
            }
            if (live_[idx(v)]) {
                unqueue(v);
                until_[idx(v)] = last_read_[k];
                wanted_[idx(v)] = next_want_[k];
                if (last_read_[k] == never) enqueue(v);
            }
            ++k;
        }
    }

    void release(Id v) {
        if (live_[idx(v)] && until_[idx(v)] == now_) enqueue(v);
    }

    void drop(Id v) {
        unqueue(v);
        live_[idx(v)] = 0;
        used_ -= p.size_of(v);
    }

    void unqueue(Id v) {
        ++version_[idx(v)];
        queued_[idx(v)] = 0;
    }

    // From here on v stays only as long as there is room.
    void enqueue(Id v) {
        if (held_[idx(v)]) return;
        if (wanted_[idx(v)] == never) {
            drop(v);
            return;
        }
        if (p.size_of(v) == 0) return;
        queued_[idx(v)] = 1;
        queue_.push({score(v), v, version_[idx(v)]});
    }

    bool evict_one() {
        while (!queue_.empty()) {
            const auto [old_score, v, version] = queue_.top();
            queue_.pop();
            if (version != version_[idx(v)] || !queued_[idx(v)]) continue;
            // Scores go stale as others come and go: look again, and go on if v is no longer
            // lowest.
            const double now_score = score(v);
            if (now_score > old_score && !queue_.empty() && now_score > std::get<0>(queue_.top())) {
                queue_.push({now_score, v, version});
                continue;
            }
            drop(v);
            return true;
        }
        return false;
    }

    double score(Id v) {
        const auto bytes = static_cast<double>(p.size_of(v));
        if (keep_ == Keep::cost_per_byte)
            return static_cast<double>(p.cost_of(p.producer_of(v))) / bytes;
        const double chain = recompute_cost_.of(v, live_, 32) / bytes;
        if (keep_ == Keep::chain_per_byte) return chain;
        return chain / static_cast<double>(std::max<std::int64_t>(1, wanted_[idx(v)] - now_));
    }

    using Entry = std::tuple<double, Id, std::uint32_t>;

    const Problem& p;
    std::span<const Id> sequence_;
    std::int64_t limit_;
    Keep keep_;
    std::int64_t used_ = 0;
    std::int64_t now_ = 0;
    bool keep_all_ = false;
    std::vector<std::uint8_t> live_, held_, queued_;
    std::vector<std::int64_t> until_, wanted_;
    std::vector<std::uint32_t> version_;
    std::vector<std::size_t> start_;
    std::vector<std::int64_t> last_read_, next_want_;
    std::priority_queue<Entry, std::vector<Entry>, std::greater<>> queue_;
    RecomputeCost recompute_cost_;
};

std::vector<Id> first_runs_only(const Problem& p, std::span<const Id> sequence) {
    std::vector<std::uint8_t> ran(idx(p.num_ops()), 0);
    std::vector<Id> kept;
    kept.reserve(sequence.size());
    for (Id op : sequence) {
        if (p.is_once(op) && ran[idx(op)]) continue;
        ran[idx(op)] = 1;
        kept.push_back(op);
    }
    return kept;
}

}  // namespace

std::vector<Id> fill_up(const Problem& problem, std::span<const Id> sequence, std::int64_t limit,
                        Keep keep, int rounds, Control& control) {
    // A round that skips runs frees what these had read, so the next may keep more; few rounds
    // settle.
    std::vector<Id> current = drop_dead_runs(problem, first_runs_only(problem, sequence));
    for (int round = 0; round < rounds && !control.expired(); ++round) {
        const auto replayed = Replay(problem, current, limit, keep).run(control);
        auto next = drop_dead_runs(problem, replayed);
        const bool settled = next.size() == current.size();
        current = std::move(next);
        if (settled) break;
    }
    return current;
}

}  // namespace rekindle
