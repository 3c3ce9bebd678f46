// The best schedule seen by the annealer, in the slots of its timeline.
#pragma once

#include <span>
#include <vector>

#include "anneal/timeline.h"

namespace rekindle {

// A schedule of the line, written down often: only the slots that changed since are copied, so that
// on a long line, where nearly every move finds a smaller peak at first, it costs no more than
// they.
class Snapshot {
   public:
    // To be told of every move that is made ...
    void follow(std::span<const Timeline::Change> changes) {
        if (whole_) return;
        for (const Timeline::Change& c : changes) changed_.push_back(c.slot);
        if (changed_.size() > slots_.size() / 16) forget();
    }
    // ... and of a line that is spaced anew.
    void forget() {
        changed_.clear();
        whole_ = true;
    }

    void save(const Timeline& line) {
        if (whole_) slots_.assign(line.slots().begin(), line.slots().end());
        for (Slot t : changed_) slots_[static_cast<std::size_t>(t)] = line.op_at(t);
        changed_.clear();
        whole_ = false;
    }

    void write(std::vector<Id>& schedule) const {
        for (Id op : slots_)
            if (op >= 0) schedule.push_back(op);
    }

   private:
    std::vector<Id> slots_;  // empty: nothing was saved
    std::vector<Slot> changed_;
    bool whole_ = true;
};

}  // namespace rekindle
