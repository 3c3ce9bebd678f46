// The current schedule: loading, questions about it, and moves that are made. Lists of events are
// sorted numbers (slot * 4 + kind), so that "where is a value current" is one search among few.
#include "anneal/timeline.h"

#include <algorithm>
#include <cmath>

#include "core/simulate.h"

namespace rekindle {

Timeline::Timeline(const Problem& problem, std::int64_t budget)
    : p_(problem), budget_(budget), soft_line_(budget) {
    const auto num_values = idx(p_.num_values());
    target_.assign(num_values, 0);
    for (Id v : p_.targets) target_[idx(v)] = 1;
    held_.assign(num_values, 0);
    for (Id v : p_.held) held_[idx(v)] = 1;
    read_kind_.assign(p_.inputs.ids.size(), read);
    for (Id i = 0; i < p_.num_ops(); ++i) {
        const std::size_t base = p_.inputs.start[idx(i)];
        const auto inputs = p_.inputs[i];
        const auto pairs = p_.inplace[i];
        for (std::size_t k = 0; k < inputs.size(); ++k) {
            for (std::size_t q = 0; q < pairs.size(); q += 2)
                if (pairs[q] == inputs[k]) read_kind_[base + k] = read_inplace;
            if (i == p_.loss && held_[idx(inputs[k])]) read_kind_[base + k] = read_held;
        }
    }
    runs_.assign(idx(p_.num_ops()), 0);
    repeated_place_.assign(idx(p_.num_ops()), -1);
    lists_.assign(num_values, {});
    touched_at_.assign(num_values, 0);
    stamp_of_.assign(num_values, 0);
    changes_.reserve(max_changes + 8);
}

void Timeline::load(std::span<const Id> schedule) {
    // Every second slot is left empty, and some at both ends: steps can be put between any two.
    constexpr Slot spacing = 2;
    num_steps_ = schedule.size();
    num_slots_ = memory_.resize(static_cast<Slot>(num_steps_ + 16) * spacing);
    slots_.assign(idx(num_slots_), none);
    std::fill(runs_.begin(), runs_.end(), 0);
    std::fill(repeated_place_.begin(), repeated_place_.end(), -1);
    repeated_.clear();
    cost_ = 0;

    std::vector<std::uint32_t> count(lists_.size(), 0);
    for (Id op : schedule) {
        for (Id v : p_.inputs[op]) ++count[idx(v)];
        for (Id v : p_.outputs[op]) ++count[idx(v)];
    }
    std::uint32_t at = 0;
    for (std::size_t v = 0; v < lists_.size(); ++v) {
        // Room to grow by half, so that few lists ever have to move (insert_event).
        const std::uint32_t room = count[v] + std::max<std::uint32_t>(4, count[v] / 2);
        lists_[v] = {at, 0, room, 0};
        at += room;
    }
    pool_.resize(at);
    for (std::size_t k = 0; k < num_steps_; ++k) {
        const Id op = schedule[k];
        const auto t = static_cast<Slot>(k) * spacing + spacing;
        slots_[idx(t)] = op;
        set_runs(op, +1);
        cost_ += p_.cost_of(op);
        const auto inputs = p_.inputs[op];
        const std::size_t base = p_.inputs.start[idx(op)];
        for (std::size_t q = 0; q < inputs.size(); ++q)
            append_event(inputs[q], event_of(t, read_kind_[base + q]));
        for (Id v : p_.outputs[op]) append_event(v, event_of(t, made));
    }
    rebuild_memory();
    begin();
}

void Timeline::respace() {
    std::vector<Id> schedule;
    write(schedule);
    load(schedule);
}

void Timeline::set_budget(std::int64_t budget) {
    budget_ = budget;
    soft_line_ = std::min(soft_line_, budget);
    count_excess();
}

void Timeline::set_soft(std::int64_t line) {
    soft_line_ = std::min(line, budget_);
    count_excess();
}

// --- reading ------------------------------------------------------------------------------------

void Timeline::write(std::vector<Id>& schedule) const {
    schedule.clear();
    schedule.reserve(num_steps_);
    for (Id op : slots_)
        if (op >= 0) schedule.push_back(op);
}

std::vector<std::int64_t> Timeline::memory() const {
    std::vector<std::int64_t> out;
    out.reserve(num_steps_);
    for (Slot t = 0; t < num_slots_; ++t)
        if (op_at(t) >= 0) out.push_back(memory_at(t));
    return out;
}

Slot Timeline::made_after(Id v, Slot t) const {
    const auto list = events(v);
    for (std::size_t k = position(list, event_of(t + 1, 0)); k < list.size(); ++k)
        if (is_made(list[k])) return slot_of(list[k]);
    return none;
}

Slot Timeline::run_of(Id op, std::int32_t k) const {
    for (std::int32_t event : events(p_.outputs[op][0]))
        if (is_made(event) && k-- == 0) return slot_of(event);
    return none;
}

bool Timeline::lives_at(Id v, Slot t) const {
    const auto list = events(v);
    const std::size_t k = position(list, event_of(t, 0));
    if (k == 0) return false;
    return k < list.size() ? !is_made(list[k]) : target_[idx(v)] != 0;
}

bool Timeline::may_gain(double wanted, Id op, Slot t, double soft_weight) const {
    double gain = 0;
    for (Id v : p_.outputs[op]) {
        const std::int64_t size = p_.size_of(v);
        if (memory_.may_gain(last_read_before(v, t) + 1, t, size, {soft_line_, budget_},
                             soft_weight, wanted, gain))
            return true;
    }
    return gain >= wanted;
}

int Timeline::num_reads(Id v, Slot t) const {
    const auto list = events(v);
    std::size_t k = position(list, event_of(t, 0)) + 1;
    int count = 0;
    for (; k < list.size() && !is_made(list[k]); ++k) ++count;
    return count;
}

// --- memory
// ---------------------------------------------------------------------------------------

void Timeline::count_excess() {
    excess_ = soft_ = 0;
    for (Slot t = 0; t < num_slots_; ++t)
        if (op_at(t) >= 0) {
            excess_ += over(memory_at(t), budget_);
            soft_ += over(memory_at(t), soft_line_);
        }
}

void Timeline::rebuild_memory() {
    std::vector<std::int64_t> delta(idx(num_slots_) + 1, 0);
    for (Id v = 0; v < p_.num_values(); ++v) {
        const auto list = events(v);
        if (list.empty()) continue;
        intervals(v, list, true, new_intervals_, false);
        for (std::size_t k = 0; k < new_intervals_.count; ++k) {
            delta[idx(new_intervals_.room[k].first)] += p_.size_of(v);
            delta[idx(new_intervals_.room[k].last) + 1] -= p_.size_of(v);
        }
    }
    std::vector<std::int64_t> memory(idx(num_slots_));
    std::int64_t live = 0, largest = 0;
    for (Slot t = 0; t < num_slots_; ++t) {
        live += delta[idx(t)];
        const Id op = op_at(t);
        memory[idx(t)] = live + (op >= 0 ? p_.workspace[idx(op)] : -empty_offset);
        largest = std::max(largest, memory[idx(t)]);
    }
    // The excess of all slots together stays below 2^62.
    std::int64_t total = largest;
    for (Id v = 0; v < p_.num_values(); ++v)
        if (p_.producer_of(v) >= 0) total += p_.size_of(v);
    shift_ = 0;
    while (((total >> shift_) + 1) > (std::int64_t{1} << 61) / (std::int64_t{num_slots_} + 1))
        ++shift_;
    round_ = (std::int64_t{1} << shift_) - 1;
    memory_.assign(memory);
    count_excess();
}

// --- event lists --------------------------------------------------------------------------------

void Timeline::append_event(Id v, std::int32_t event) {
    List& list = lists_[idx(v)];
    pool_[list.at + list.length++] = event;
    list.copies += is_made(event);
}

void Timeline::insert_event(Id v, std::int32_t event) {
    List& list = lists_[idx(v)];
    if (list.length == list.room) {  // moves to the end of the pool; the hole is closed by respace
        const auto at = static_cast<std::uint32_t>(pool_.size());
        pool_.resize(pool_.size() + 2 * list.room);
        std::copy_n(pool_.begin() + list.at, list.length, pool_.begin() + at);
        list.at = at;
        list.room *= 2;
    }
    const std::size_t k = position(events(v), event);
    std::int32_t* base = pool_.data() + list.at;
    std::copy_backward(base + k, base + list.length, base + list.length + 1);
    base[k] = event;
    ++list.length;
    list.copies += is_made(event);
}

void Timeline::erase_event(Id v, std::int32_t event) {
    List& list = lists_[idx(v)];
    const std::size_t k = position(events(v), event);
    std::int32_t* base = pool_.data() + list.at;
    std::copy(base + k + 1, base + list.length, base + k);
    --list.length;
    list.copies -= is_made(event);
}

void Timeline::set_runs(Id op, std::int32_t change) {
    std::int32_t& runs = runs_[idx(op)];
    runs += change;
    std::int32_t& place = repeated_place_[idx(op)];
    if (runs > 1 && place < 0) {
        place = static_cast<std::int32_t>(repeated_.size());
        repeated_.push_back(op);
    } else if (runs <= 1 && place >= 0) {
        repeated_[idx(place)] = repeated_.back();
        repeated_place_[idx(repeated_.back())] = place;
        repeated_.pop_back();
        place = -1;
    }
}

// --- a move (what it would do: anneal/evaluate.cpp) ----------------------------------------------

void Timeline::begin() {
    changes_.clear();
    cost_change_ = excess_change_ = soft_change_ = 0;
}

void Timeline::take(Slot t) {
    const Id op = op_at(t);
    changes_.push_back({op, t, false});
    cost_change_ -= p_.cost_of(op);
}

void Timeline::put(Id op, Slot t) {
    changes_.push_back({op, t, true});
    cost_change_ += p_.cost_of(op);
    slots_[idx(t)] = -2;  // promised; settled by commit or abandon
}

void Timeline::abandon() {
    for (const Change& c : changes_)
        if (c.add) slots_[idx(c.slot)] = none;
}

void Timeline::commit() {
    if (is_shift_) return commit_shift();
    // In each list the modifications of the move, which `settle` has sorted.
    for (const Touched& touched : touched_)
        for (std::int32_t m = touched.first; m >= 0; m = modifications_[idx(m)].next) {
            const Modification& change = modifications_[idx(m)];
            if (change.add)
                insert_event(touched.value, change.event);
            else
                erase_event(touched.value, change.event);
        }
    for (const Change& c : changes_) {
        slots_[idx(c.slot)] = c.add ? c.op : none;
        set_runs(c.op, c.add ? +1 : -1);
        num_steps_ = c.add ? num_steps_ + 1 : num_steps_ - 1;
    }
    cost_ += cost_change_;
    excess_ += excess_change_;
    soft_ += soft_change_;
    apply_memory(+1);
}

void Timeline::commit_shift() {
    // Neither the number of events nor of steps changes, nor the cost: each event slides past the
    // others of its list, without a search.
    const Id op = changes_[0].op;
    const Shifted* shifted = shifted_.data();
    for (const auto& values : {p_.inputs[op], p_.outputs[op]})
        for (Id v : values) {
            std::int32_t* list = pool_.data() + lists_[idx(v)].at;
            std::uint32_t k = shifted->from;
            for (; k < shifted->to; ++k) list[k] = list[k + 1];
            for (; k > shifted->to; --k) list[k] = list[k - 1];
            list[k] = shifted->event;
            ++shifted;
        }
    slots_[idx(changes_[0].slot)] = none;
    slots_[idx(changes_[1].slot)] = op;
    excess_ += excess_change_;
    soft_ += soft_change_;
    apply_memory(+1);
}

bool Timeline::consistent() const {
    std::vector<Id> schedule;
    write(schedule);
    // Not a debugging aid alone: tests call it after every move (check_moves).
    const Trace trace = simulate(p_, schedule);
    if (!trace.valid() || schedule.size() != num_steps_) return false;
    std::int64_t cost = 0, excess = 0, soft = 0;
    for (Id op : schedule) cost += p_.cost_of(op);
    const auto mine = memory();
    for (std::size_t t = 0; t < mine.size(); ++t) {
        if (static_cast<std::uint64_t>(mine[t]) != trace.memory[t]) return false;
        excess += over(mine[t], budget_);
        soft += over(mine[t], soft_line_);
    }
    for (Id op = 0; op < p_.num_ops(); ++op)
        if (trace.runs[idx(op)] != runs(op)) return false;
    return cost == cost_ && excess == excess_ && soft == soft_ &&
           static_cast<std::uint64_t>(peak()) == (schedule.empty() ? 0 : trace.peak);
}

}  // namespace rekindle
