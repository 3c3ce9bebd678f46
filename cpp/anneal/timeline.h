// A schedule under local change: which op stands in which slot of a line with gaps, where each
// value is made and read, and the memory of every step, kept up to date move by move.
//
// A move is a transaction of `take` (remove a step) and `put` (add a step). `evaluate` says what it
// would do without touching anything; `commit` does it. The meaning of memory is
// core/simulate.cpp's, bit for bit:
// - per value there is one sorted list of events (made at slot t / read at slot t);
// - a copy counts from where it is made to its last read before it is recomputed; to the end, where
//   it is the last copy of a target or was read by the loss op and is held; and not at its last
//   read, where the reader may write its output over it (`inplace`);
// - an empty slot is pushed far below zero, so that it neither peaks nor counts as excess.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "anneal/memory.h"
#include "core/problem.h"

namespace rekindle {

using Slot = std::int32_t;

class Timeline {
   public:
    static constexpr std::int64_t empty_offset = 2 * BlockMemory::empty_below;
    static constexpr Slot none = -1;
    static constexpr std::size_t max_changes = 96;

    struct Change {
        Id op;
        Slot slot;
        bool add;
    };

    Timeline(const Problem& problem, std::int64_t budget);

    // Starts from a valid schedule, spread over a line with room between the steps.
    void load(std::span<const Id> schedule);
    void respace();
    void set_budget(std::int64_t budget);
    // Excess above a second, lower line is summed too: it says which way is down within the budget.
    void set_soft(std::int64_t line);

    // --- the current schedule -------------------------------------------------------------------
    std::int64_t cost() const { return cost_; }
    std::int64_t excess() const { return excess_; }  // sum over steps of what exceeds the budget
    std::int64_t soft() const { return soft_; }      // the same above the soft line
    std::int64_t peak() const { return memory_.peak(); }
    std::int64_t budget() const { return budget_; }
    std::int64_t soft_line() const { return soft_line_; }
    Slot num_slots() const { return num_slots_; }
    std::size_t num_steps() const { return num_steps_; }
    std::span<const Id> slots() const { return slots_; }  // an op, or less than zero
    Id op_at(Slot t) const { return slots_[static_cast<std::size_t>(t)]; }
    std::int32_t runs(Id op) const { return runs_[static_cast<std::size_t>(op)]; }
    std::span<const Id> repeated() const { return repeated_; }  // ops that stand more than once
    void write(std::vector<Id>& schedule) const;
    std::vector<std::int64_t> memory() const;  // per step, in order
    std::int64_t memory_at(Slot t) const { return memory_.at(t); }
    Slot peak_slot() const { return memory_.peak_slot(); }

    // --- where a value is made and read ---------------------------------------------------------
    Slot made_before(Id v, Slot t) const;       // the copy that a step at t would read
    Slot made_after(Id v, Slot t) const;        // the next copy, or `none`
    Slot read_after(Id v, Slot t) const;        // the first read after t of the copy current at t
    Slot last_read_before(Id v, Slot t) const;  // of the copy current at t; else where it is made
    Slot run_of(Id op, std::int32_t k) const;   // the slot of the k-th run
    bool lives_at(Id v, Slot t) const;          // current at t and still to be read after it
    int num_reads(Id v, Slot made) const;       // reads of the copy made there

    // --- a move ---------------------------------------------------------------------------------
    void begin();
    bool full(std::size_t more) const { return changes_.size() + more > max_changes; }
    bool planned(Slot t) const;              // already part of the move
    bool inside(Slot low, Slot high) const;  // the whole move lies in [low, high)
    std::span<const Change> changes() const { return changes_; }
    void take(Slot t);
    void put(Id op, Slot t);
    Slot free_before(Slot t, Slot low) const;  // the nearest empty slot in (low, t), or `none`
    Slot free_after(Slot t, Slot high) const;  // the nearest empty slot in (t, high), or `none`
    std::int64_t cost_change() const { return cost_change_; }
    // False: a further run of `op` at t gains less weighted excess than that, however soon what it
    // makes is dropped before (`soft_weight`: of the excess above the soft line).
    bool may_gain(double wanted, Id op, Slot t, double soft_weight) const;

    // False: some step would read what nothing has made. Runs that the move leaves without a reader
    // are removed with it, so the cost is known only now.
    bool settle();
    // After settle: what the move does to the excess. Commit wants it.
    void measure();
    bool evaluate() {
        if (!settle()) return false;
        measure();
        return true;
    }
    std::int64_t excess_change() const { return excess_change_; }
    std::int64_t soft_change() const { return soft_change_; }
    void commit();
    void abandon();

    // The memory part of a settled move, done and undone: for objectives that need the peak.
    void apply_memory(int sign) { memory_.add(segments_, sign); }

    void smooth(double unit) { memory_.smooth(unit); }
    double smooth_peak() const { return memory_.smooth_peak(); }

    bool consistent() const;  // everything above equals a full simulation

   private:
    enum Kind : std::int32_t { made = 0, read = 1, read_inplace = 2, read_held = 3 };
    struct List {
        std::uint32_t at = 0, length = 0, room = 0;
        std::uint32_t copies = 0;  // how many of the events are `made`; the first always is
    };
    struct Touched {
        Id value;
        std::int32_t first;  // its first modification, in event order
    };
    struct Modification {
        std::int32_t event;
        std::int32_t next;
        std::int32_t change;  // of which change it is a part
        bool add;
    };
    struct Interval {
        Slot first, last;
    };
    struct Intervals {
        std::vector<Interval> room;
        std::size_t count = 0;
    };
    struct Break {
        Slot at;
        std::int64_t change;
    };
    // Within one value's list, the event at `from` becomes `event` and stands at `to`.
    struct Shifted {
        std::uint32_t from, to;
        std::int32_t event;
    };

    static std::int32_t event_of(Slot t, std::int32_t kind) { return (t << 2) | kind; }
    static Slot slot_of(std::int32_t event) { return event >> 2; }
    static bool is_made(std::int32_t event) { return (event & 3) == made; }

    std::span<const std::int32_t> events(Id v) const;
    std::size_t position(std::span<const std::int32_t> list, std::int32_t event) const;
    void insert_event(Id v, std::int32_t event);
    void erase_event(Id v, std::int32_t event);
    void append_event(Id v, std::int32_t event);

    enum class Shift : std::uint8_t { simple, general, invalid };
    Shift collect_shift();
    Shift shift_made(Id v, Slot from, Slot to);
    Shift shift_read(Id v, std::int32_t kind, Slot from, Slot to);
    void commit_shift();
    void modify(Id v, std::int32_t event, std::int32_t change, bool add);
    void record(std::int32_t change);
    bool collect();
    bool collect_value(const Touched& touched);
    bool collect_reads(const Touched& touched, std::span<const std::int32_t> old, bool& valid);
    const Modification* removed(const Touched& touched, std::int32_t event) const;
    void break_after(std::int32_t event, const Modification* made_by, std::int64_t size);
    void merge(const Touched& touched, std::span<const std::int32_t> old, std::size_t& from,
               std::size_t& to);
    void intervals(Id v, std::span<const std::int32_t> list, bool tail, Intervals& out,
                   bool find_dead);
    void compare(std::int64_t size);
    bool drop_dead();
    bool dead_after(Id op, Slot t);
    void build_segments();
    void measure_in_units();
    std::int64_t over(std::int64_t memory, std::int64_t line) const {
        return memory > line ? (memory - line + round_) >> shift_ : 0;
    }
    void count_excess();
    void rebuild_memory();
    void set_runs(Id op, std::int32_t change);

    const Problem& p_;
    std::int64_t budget_;
    std::int64_t soft_line_;
    std::int64_t round_ = 0;
    int shift_ = 0;  // excess is counted in units of 2^shift, so that its sum fits 64 bits
    std::vector<std::uint8_t> target_, held_;  // per value
    std::vector<std::uint8_t> read_kind_;      // parallel to inputs.ids

    std::vector<Id> slots_;
    Slot num_slots_ = 0;
    std::size_t num_steps_ = 0;
    std::int64_t cost_ = 0, excess_ = 0, soft_ = 0;
    std::vector<std::int32_t> runs_;
    std::vector<Id> repeated_;
    std::vector<std::int32_t> repeated_place_;
    std::vector<List> lists_;
    std::vector<std::int32_t> pool_;
    BlockMemory memory_;

    std::vector<Change> changes_;
    std::vector<Touched> touched_;
    std::vector<Modification> modifications_;
    std::vector<std::int32_t> touched_at_;  // per value
    std::vector<std::uint32_t> stamp_of_;
    std::uint32_t stamp_ = 0;
    std::vector<std::int32_t> scratch_;
    std::span<const std::int32_t> merged_;
    Intervals old_intervals_, new_intervals_;
    std::vector<Break> breaks_;
    std::vector<MemorySegment> segments_;
    std::vector<Change> dead_;  // runs that lost their last reader
    bool is_shift_ = false;     // the move is one step to another slot, and nothing else changes
    std::vector<Shifted> shifted_;  // then: one per input, one per output of its op
    std::int64_t cost_change_ = 0, excess_change_ = 0, soft_change_ = 0;
};

// --- small and hot -------------------------------------------------------------------------------

inline std::span<const std::int32_t> Timeline::events(Id v) const {
    const List& list = lists_[static_cast<std::size_t>(v)];
    return {pool_.data() + list.at, list.length};
}

// The number of events before `event`.
inline std::size_t Timeline::position(std::span<const std::int32_t> list,
                                      std::int32_t event) const {
    if (list.size() > 24)
        return static_cast<std::size_t>(std::lower_bound(list.begin(), list.end(), event) -
                                        list.begin());
    std::size_t k = 0;
    for (std::int32_t e : list) k += e < event;
    return k;
}

inline Slot Timeline::made_before(Id v, Slot t) const {
    const auto list = events(v);
    if (lists_[static_cast<std::size_t>(v)].copies == 1) {
        const Slot only = slot_of(list[0]);
        return only < t ? only : none;
    }
    for (std::size_t k = position(list, event_of(t, 0)); k-- > 0;)
        if (is_made(list[k])) return slot_of(list[k]);
    return none;
}

inline Slot Timeline::read_after(Id v, Slot t) const {
    const auto list = events(v);
    const std::size_t k = position(list, event_of(t + 1, 0));
    return k < list.size() && !is_made(list[k]) ? slot_of(list[k]) : none;
}

inline Slot Timeline::last_read_before(Id v, Slot t) const {
    const auto list = events(v);
    const std::size_t k = position(list, event_of(t, 0));
    return k > 0 ? slot_of(list[k - 1]) : none;
}

inline bool Timeline::planned(Slot t) const {
    for (const Change& c : changes_)
        if (c.slot == t) return true;
    return false;
}

inline bool Timeline::inside(Slot low, Slot high) const {
    for (const Change& c : changes_)
        if (c.slot < low || c.slot >= high) return false;
    return true;
}

inline Slot Timeline::free_before(Slot t, Slot low) const {
    for (--t; t > low; --t)
        if (slots_[static_cast<std::size_t>(t)] == none) return t;
    return none;
}

inline Slot Timeline::free_after(Slot t, Slot high) const {
    for (++t; t < high; ++t)
        if (slots_[static_cast<std::size_t>(t)] == none) return t;
    return none;
}

}  // namespace rekindle
