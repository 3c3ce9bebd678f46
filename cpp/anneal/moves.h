// The moves of the annealer: each proposes a transaction on a timeline, at random.
//
// The paper's three (add a run, remove a run, rotate a step to an empty slot) make most proposals
// invalid or senseless. These look first where the values are made and read:
// - shift: a step elsewhere between what it reads and its first reader;
// - shift a chain: with the steps that only serve it (later), or that it feeds (earlier);
// - recompute: make a value again shortly before one of its reads, with what that needs;
// - relieve: the same for a value that lies idle across a step above the budget;
// - forget: remove one of several runs of an op;
// - exchange: forget one run and recompute another value across the same time.
#pragma once

#include <array>
#include <cstdint>

#include "anneal/timeline.h"
#include "core/random.h"

namespace rekindle {

class Moves {
   public:
    enum Kind : std::size_t { shift, chain, recompute, relieve, forget, exchange, add, rotate };
    static constexpr std::size_t num_kinds = 8;

    Moves(const Problem& problem, Timeline& timeline, Random& random, bool reorder_only,
          bool paper_moves);

    // Most moves begin in [low, high) from now on; nothing there: anywhere.
    void look_at(Slot low, Slot high) { low_ = low, high_ = high; }

    Kind choose();
    // Fills the timeline's transaction; false if nothing could be proposed.
    bool propose(Kind kind);
    // The run that the proposal adds so that a value need not wait for it, or none.
    Id added() const { return added_; }
    Slot added_at() const { return added_at_; }

   private:
    Slot random_slot();
    Slot random_step();
    Slot random_near(Slot from, Slot low, Slot high);
    void window(Id op, Slot t, Slot& low, Slot& high) const;
    Slot first_read(Id op, Slot t) const;
    Slot last_made(Id op, Slot t, Slot enough) const;
    bool aim(Slot& from, Slot& low, Slot& high);
    Slot hot_step();
    bool propose_shift();
    bool propose_chain();
    void follow_inputs(Id op, Slot from, Slot& cursor, int depth);
    void follow_readers(Id op, Slot from, Slot& cursor, int depth);
    bool propose_recompute();
    bool propose_relieve(Slot over);
    bool propose_forget();
    bool propose_exchange();
    bool propose_add();
    bool propose_rotate();
    bool remake(Id v, Slot before, Slot low);
    void supply(Id op, Slot at, Slot& cursor, int& most);
    Slot over_budget_step();

    const Problem& p_;
    Timeline& line_;
    Random& random_;
    Slot low_ = 0, high_ = 0;
    Id added_ = Timeline::none;
    Slot added_at_ = Timeline::none;
    std::array<std::uint32_t, num_kinds> until_{};  // cumulative weights
};

}  // namespace rekindle
