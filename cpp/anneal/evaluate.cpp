// The timeline's moves before they are made: whether they are valid, which runs they leave without
// a reader, and what they do to memory.
#include <algorithm>

#include "anneal/timeline.h"

namespace rekindle {

bool Timeline::settle() {
    is_shift_ = false;
    if (changes_.size() == 2 && !changes_[0].add && changes_[1].add &&
        changes_[0].op == changes_[1].op) {
        const Shift shift = collect_shift();
        if (shift == Shift::invalid) return false;
        is_shift_ = shift == Shift::simple;
    }
    if (!is_shift_) {
        do {
            if (!collect()) return false;
        } while (drop_dead());
    }
    build_segments();
    return true;
}

// The commonest move by far, one step to another slot, where each of its reads stays with its copy
// and what it makes is read by the same steps as before (else `general`, or not valid).
Timeline::Shift Timeline::collect_shift() {
    const Id op = changes_[0].op;
    const Slot from = changes_[0].slot, to = changes_[1].slot;
    const std::int64_t own = p_.workspace[idx(op)] + empty_offset;
    // Nearly all that changes, changes at these four slots; they stay in order.
    const std::size_t f = from < to ? 0 : 2, g = 2 - f;
    breaks_.resize(4);
    breaks_[f] = {from, -own};
    breaks_[f + 1] = {from + 1, own};
    breaks_[g] = {to, own};
    breaks_[g + 1] = {to + 1, -own};
    shifted_.clear();
    const auto inputs = p_.inputs[op];
    const std::size_t base = p_.inputs.start[idx(op)];
    for (std::size_t k = 0; k < inputs.size(); ++k)
        if (const Shift shift = shift_read(inputs[k], read_kind_[base + k], from, to);
            shift != Shift::simple)
            return shift;
    for (Id v : p_.outputs[op])
        if (const Shift shift = shift_made(v, from, to); shift != Shift::simple) return shift;
    return Shift::simple;
}

Timeline::Shift Timeline::shift_read(Id v, std::int32_t kind, Slot from, Slot to) {
    if (held_[idx(v)]) return Shift::general;
    const auto list = events(v);
    const std::int32_t before = event_of(from, kind), after = event_of(to, kind);
    const std::size_t k = position(list, before);
    std::size_t at = k;  // where the read would stand
    std::int32_t old_last = before, new_last = after;
    if (to > from) {
        for (; at + 1 < list.size() && list[at + 1] < after; ++at)
            if (is_made(list[at + 1])) return Shift::general;
        old_last = list[at];
    } else {
        for (; at > 0 && list[at - 1] > after; --at)
            if (is_made(list[at - 1])) return at == 1 ? Shift::invalid : Shift::general;
        if (at < k) new_last = list[k - 1];
    }
    shifted_.push_back({static_cast<std::uint32_t>(k), static_cast<std::uint32_t>(at), after});
    // Memory changes only where this was, or becomes, the copy's last read.
    const std::size_t next = std::max(k, at) + 1;
    if (next < list.size() ? !is_made(list[next]) : target_[idx(v)] != 0) return Shift::simple;
    const std::int64_t size = p_.size_of(v);
    const std::size_t f = from < to ? 0 : 2, g = 2 - f;
    if (old_last == before && kind != read_inplace)
        breaks_[f + 1].change += size;
    else
        breaks_.push_back({slot_of(old_last) + ((old_last & 3) != read_inplace), size});
    if (new_last == after && kind != read_inplace)
        breaks_[g + 1].change -= size;
    else
        breaks_.push_back({slot_of(new_last) + ((new_last & 3) != read_inplace), -size});
    return Shift::simple;
}

Timeline::Shift Timeline::shift_made(Id v, Slot from, Slot to) {
    const auto list = events(v);
    const std::int32_t after = event_of(to, made);
    const auto k = static_cast<std::uint32_t>(position(list, event_of(from, made)));
    if (to > from ? k + 1 < list.size() && list[k + 1] < after : k > 0 && list[k - 1] > after)
        return k == 0 ? Shift::invalid : Shift::general;
    shifted_.push_back({k, k, after});
    const std::int64_t size = p_.size_of(v);
    const std::size_t f = from < to ? 0 : 2, g = 2 - f;
    breaks_[f].change -= size;
    breaks_[g].change += size;
    if (k + 1 < list.size() ? !is_made(list[k + 1]) : target_[idx(v)] != 0) return Shift::simple;
    breaks_[f + 1].change += size;  // read by nothing: there during its own step
    breaks_[g + 1].change -= size;
    return Shift::simple;
}

void Timeline::modify(Id v, std::int32_t event, std::int32_t change, bool add) {
    const auto m = static_cast<std::int32_t>(modifications_.size());
    if (stamp_of_[idx(v)] != stamp_) {
        stamp_of_[idx(v)] = stamp_;
        touched_at_[idx(v)] = static_cast<std::int32_t>(touched_.size());
        touched_.push_back({v, m});
        modifications_.push_back({event, -1, change, add});
        return;
    }
    Touched& touched = touched_[idx(touched_at_[idx(v)])];
    std::int32_t before = -1, after = touched.first;
    while (after >= 0 && modifications_[idx(after)].event < event) {
        before = after;
        after = modifications_[idx(after)].next;
    }
    modifications_.push_back({event, after, change, add});
    (before < 0 ? touched.first : modifications_[idx(before)].next) = m;
}

void Timeline::record(std::int32_t change) {
    const Change& c = changes_[idx(change)];
    const auto inputs = p_.inputs[c.op];
    const std::size_t base = p_.inputs.start[idx(c.op)];
    for (std::size_t k = 0; k < inputs.size(); ++k)
        modify(inputs[k], event_of(c.slot, read_kind_[base + k]), change, c.add);
    for (Id v : p_.outputs[c.op]) modify(v, event_of(c.slot, made), change, c.add);
    // The step itself: an empty slot lies far below zero.
    const std::int64_t own = p_.workspace[idx(c.op)] + empty_offset;
    breaks_.push_back({c.slot, c.add ? own : -own});
    breaks_.push_back({c.slot + 1, c.add ? -own : own});
}

bool Timeline::collect() {
    ++stamp_;
    touched_.clear();
    modifications_.clear();
    breaks_.clear();
    dead_.clear();
    for (std::size_t k = 0; k < changes_.size(); ++k) record(static_cast<std::int32_t>(k));
    for (const Touched& touched : touched_)
        if (!collect_value(touched)) return false;
    return true;
}

bool Timeline::collect_value(const Touched& touched) {
    const Id v = touched.value;
    const auto old = events(v);
    bool valid;
    if (collect_reads(touched, old, valid)) return valid;
    std::size_t from, to;
    merge(touched, old, from, to);
    const bool tail = to == old.size();
    if (from == 0) {
        if (merged_.empty() ? target_[idx(v)] && tail : !is_made(merged_.front())) return false;
    }
    intervals(v, old.subspan(from, to - from), tail, old_intervals_, false);
    intervals(v, merged_, tail, new_intervals_, true);
    if (p_.size_of(v) > 0) compare(p_.size_of(v));
    return true;
}

// The common case, without copying: only reads change, and all of one copy. False: not that case.
bool Timeline::collect_reads(const Touched& touched, std::span<const std::int32_t> old,
                             bool& valid) {
    const Id v = touched.value;
    if (held_[idx(v)]) return false;
    std::int32_t last_change = 0;
    const Modification* last_added = nullptr;
    for (std::int32_t m = touched.first; m >= 0; m = modifications_[idx(m)].next) {
        last_change = modifications_[idx(m)].event;
        if (is_made(last_change)) return false;
        if (modifications_[idx(m)].add) last_added = &modifications_[idx(m)];
    }
    const std::size_t start = position(old, modifications_[idx(touched.first)].event);
    valid = start > 0;
    if (!valid) return true;  // read before it is made
    std::size_t stop = old.size();
    if (lists_[idx(v)].copies > 1) {
        stop = start;
        while (stop < old.size() && !is_made(old[stop])) ++stop;
    }
    if (stop < old.size() ? old[stop] < last_change : target_[idx(v)] != 0) return false;
    // The last read that stays: from the back, skip those that go.
    std::size_t k = stop;
    const Modification *last_removed = nullptr, *gone = nullptr;
    while (k > start && (gone = removed(touched, old[k - 1])) != nullptr) {
        if (k == stop) last_removed = gone;
        --k;
    }
    const std::int32_t before = old[stop - 1];
    const bool is_added = last_added && last_added->event > old[k - 1];
    const std::int32_t after = is_added ? last_added->event : old[k - 1];
    if (after == before) return true;
    if (is_made(after) && !p_.is_once(p_.producer_of(v)))
        dead_.push_back({p_.producer_of(v), slot_of(after), false});
    break_after(before, last_removed, p_.size_of(v));
    break_after(after, is_added ? last_added : nullptr, -p_.size_of(v));
    return true;
}

// A copy's last event was, or becomes, this one. The breaks of the changes come first, two for
// each.
void Timeline::break_after(std::int32_t event, const Modification* made_by, std::int64_t size) {
    const bool in_place = (event & 3) == read_inplace;
    if (made_by && !in_place)
        breaks_[2 * idx(made_by->change) + 1].change += size;
    else
        breaks_.push_back({slot_of(event) + !in_place, size});
}

const Timeline::Modification* Timeline::removed(const Touched& touched, std::int32_t event) const {
    for (std::int32_t m = touched.first; m >= 0; m = modifications_[idx(m)].next)
        if (modifications_[idx(m)].event == event)
            return modifications_[idx(m)].add ? nullptr : &modifications_[idx(m)];
    return nullptr;
}

// The part of a value's events that the move concerns, as it would be: from the copy before the
// first change up to the first copy after the last.
void Timeline::merge(const Touched& touched, std::span<const std::int32_t> old, std::size_t& from,
                     std::size_t& to) {
    if (scratch_.size() < old.size() + 2 * max_changes) scratch_.resize(2 * old.size() + 1024);
    std::int32_t m = touched.first;
    std::size_t k = position(old, modifications_[idx(m)].event);
    from = k;
    while (from > 0 && !is_made(old[--from])) {
    }
    std::int32_t* out = scratch_.data();
    for (std::size_t i = from; i < k; ++i) *out++ = old[i];
    for (; m >= 0; m = modifications_[idx(m)].next) {
        const Modification& change = modifications_[idx(m)];
        while (k < old.size() && old[k] < change.event) *out++ = old[k++];
        if (change.add)
            *out++ = change.event;
        else
            ++k;
    }
    while (k < old.size() && !is_made(old[k])) *out++ = old[k++];
    to = k;
    merged_ = {scratch_.data(), out};
}

// Where the copies of a part of a value's events count.
void Timeline::intervals(Id v, std::span<const std::int32_t> list, bool tail, Intervals& out,
                         bool find_dead) {
    if (out.room.size() < list.size()) out.room.resize(2 * list.size() + 64);
    out.count = 0;
    for (std::size_t k = 0; k < list.size();) {
        const Slot first = slot_of(list[k]);
        bool lives_on = false;
        for (++k; k < list.size() && !is_made(list[k]); ++k)
            lives_on = lives_on || (list[k] & 3) == read_held;
        if (k == list.size() && tail && target_[idx(v)]) lives_on = true;
        Slot last = slot_of(list[k - 1]);
        if (lives_on)
            last = num_slots_ - 1;
        else if ((list[k - 1] & 3) == read_inplace)
            --last;  // written over by its reader
        else if (find_dead && last == first && !p_.is_once(p_.producer_of(v)))
            dead_.push_back({p_.producer_of(v), first, false});
        out.room[out.count++] = {first, last};
    }
}

void Timeline::compare(std::int64_t size) {
    const Interval *a = old_intervals_.room.data(), *b = new_intervals_.room.data();
    const Interval *a_end = a + old_intervals_.count, *b_end = b + new_intervals_.count;
    while (a < a_end || b < b_end) {
        if (a < a_end && b < b_end && a->first == b->first) {
            if (a->last != b->last) {
                breaks_.push_back({a->last + 1, size});
                breaks_.push_back({b->last + 1, -size});
            }
            ++a, ++b;
        } else if (b == b_end || (a < a_end && a->first < b->first)) {
            breaks_.push_back({a->first, -size});
            breaks_.push_back({a->last + 1, size});
            ++a;
        } else {
            breaks_.push_back({b->first, size});
            breaks_.push_back({b->last + 1, -size});
            ++b;
        }
    }
}

// Adds the removal of runs that the move leaves useless; true if there were any.
bool Timeline::drop_dead() {
    bool any = false;
    for (const Change& run : dead_) {
        if (planned(run.slot) || full(1) || !dead_after(run.op, run.slot)) continue;
        take(run.slot);
        any = true;
    }
    return any;
}

bool Timeline::dead_after(Id op, Slot t) {
    for (Id v : p_.outputs[op]) {
        const auto old = events(v);
        std::span<const std::int32_t> list = old;
        bool tail = true;
        if (stamp_of_[idx(v)] == stamp_) {
            std::size_t from, to;
            merge(touched_[idx(touched_at_[idx(v)])], old, from, to);
            // A copy outside the part that changes is as it was.
            const std::int32_t event = event_of(t, made);
            if ((from == 0 || old[from] <= event) && (to == old.size() || event < old[to])) {
                list = merged_;
                tail = to == old.size();
            }
        }
        const std::size_t k = position(list, event_of(t, made)) + 1;
        if (k < list.size() ? !is_made(list[k]) : tail && target_[idx(v)]) return false;
    }
    return true;
}

void Timeline::build_segments() {
    // A dozen breaks, nearly in order.
    for (std::size_t i = 1; i < breaks_.size(); ++i) {
        const Break x = breaks_[i];
        std::size_t j = i;
        for (; j > 0 && breaks_[j - 1].at > x.at; --j) breaks_[j] = breaks_[j - 1];
        breaks_[j] = x;
    }
    segments_.clear();
    std::int64_t change = 0;
    for (std::size_t i = 0; i < breaks_.size();) {
        const Slot at = breaks_[i].at;
        if (at >= num_slots_) break;
        for (; i < breaks_.size() && breaks_[i].at == at; ++i) change += breaks_[i].change;
        const Slot next = i < breaks_.size() ? std::min(breaks_[i].at, num_slots_) : num_slots_;
        if (change != 0) segments_.push_back({at, next - 1, change});
    }
}

void Timeline::measure() {
    if (shift_ > 0) return measure_in_units();
    const Excess change = memory_.excess_change(segments_, {soft_line_, budget_});
    soft_change_ = change.soft;
    excess_change_ = change.hard;
}

void Timeline::measure_in_units() {
    excess_change_ = soft_change_ = 0;
    for (const MemorySegment& s : segments_)
        for (Slot t = s.first; t <= s.last; ++t) {
            const std::int64_t before = memory_at(t), after = before + s.change;
            soft_change_ += over(after, soft_line_) - over(before, soft_line_);
            excess_change_ += over(after, budget_) - over(before, budget_);
        }
}

}  // namespace rekindle
