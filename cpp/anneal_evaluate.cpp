// The timeline's moves before they are made: whether they are valid, which runs they leave without a
// reader, and what they do to memory.
#include <algorithm>

#include "anneal_timeline.h"
#include "wide.h"

namespace rekindle {

namespace {

constexpr std::size_t idx(std::int32_t i) { return static_cast<std::size_t>(i); }

// The memory array, for the one loop that is worth wide registers.
struct BlockView {
    const std::int64_t *memory, *pending, *maximum;
    int block_bits;
    std::int64_t soft_line, budget;
};

// What a change of memory in [first, last] does to the sums above the two lines.
REKINDLE_WIDE void measure_range(const BlockView& view, Slot first, Slot last, std::int64_t change,
                                 std::int64_t& soft_sum, std::int64_t& hard_sum) {
    const std::int64_t gap = view.budget - view.soft_line;
    while (first <= last) {
        const auto block = idx(first >> view.block_bits);
        const Slot stop = std::min(last, static_cast<Slot>((block + 1) << view.block_bits) - 1);
        const std::int64_t m = std::max(view.maximum[block], view.maximum[block] + change);
        const std::int64_t base = view.pending[block] - view.soft_line;
        const std::int64_t* memory = view.memory + first;
        const Slot count = stop - first + 1;
        std::int64_t soft = 0, hard = 0;
        if (m > view.budget) {
            for (Slot t = 0; t < count; ++t) {
                const std::int64_t x = memory[t] + base, y = x + change;
                soft += std::max<std::int64_t>(y, 0) - std::max<std::int64_t>(x, 0);
                hard += std::max(y, gap) - std::max(x, gap);
            }
        } else if (m > view.soft_line) {
            for (Slot t = 0; t < count; ++t) {
                const std::int64_t x = memory[t] + base;
                soft += std::max<std::int64_t>(x + change, 0) - std::max<std::int64_t>(x, 0);
            }
        }
        soft_sum += soft;
        hard_sum += hard;
        first = stop + 1;
    }
}

}  // namespace

bool Timeline::settle() {
    is_shift_ = changes_.size() == 2 && !changes_[0].add && changes_[1].add &&
                changes_[0].op == changes_[1].op && collect_shift();
    if (is_shift_) return true;
    do {
        if (!collect()) return false;
    } while (drop_dead());
    return true;
}

// The commonest move by far, one step to another slot, where each of its reads stays with its copy and
// what it makes is read by the same steps as before. False: not that case, or not valid.
bool Timeline::collect_shift() {
    const Id op = changes_[0].op;
    const Slot from = changes_[0].slot, to = changes_[1].slot;
    breaks_.clear();
    shifted_.clear();
    const auto inputs = p_.inputs[op];
    const std::size_t base = p_.inputs.start[idx(op)];
    for (std::size_t k = 0; k < inputs.size(); ++k)
        if (!shift_read(inputs[k], read_kind_[base + k], from, to)) return false;
    for (Id v : p_.outputs[op])
        if (!shift_made(v, from, to)) return false;
    const std::int64_t own = p_.workspace[idx(op)] + empty_offset;
    breaks_.insert(breaks_.end(), {{from, -own}, {from + 1, own}, {to, own}, {to + 1, -own}});
    return true;
}

bool Timeline::shift_read(Id v, std::int32_t kind, Slot from, Slot to) {
    if (held_[idx(v)]) return false;
    const auto list = events(v);
    const std::int32_t before = event_of(from, kind), after = event_of(to, kind);
    const std::size_t k = position(list, before);
    std::size_t at = k;  // where the read would stand
    std::int32_t old_last = before, new_last = after;
    if (to > from) {
        for (; at + 1 < list.size() && list[at + 1] < after; ++at)
            if (is_made(list[at + 1])) return false;
        old_last = list[at];
    } else {
        for (; at > 0 && list[at - 1] > after; --at)
            if (is_made(list[at - 1])) return false;
        if (at == 0) return false;
        if (at < k) new_last = list[k - 1];
    }
    shifted_.push_back({static_cast<std::uint32_t>(k), static_cast<std::uint32_t>(at), after});
    // Memory changes only where this was, or becomes, the copy's last read.
    const std::size_t next = std::max(k, at) + 1;
    if (next < list.size() ? !is_made(list[next]) : target_[idx(v)] != 0) return true;
    breaks_.push_back({slot_of(old_last) + ((old_last & 3) != read_inplace), p_.size_of(v)});
    breaks_.push_back({slot_of(new_last) + ((new_last & 3) != read_inplace), -p_.size_of(v)});
    return true;
}

bool Timeline::shift_made(Id v, Slot from, Slot to) {
    const auto list = events(v);
    const std::int32_t after = event_of(to, made);
    const auto k = static_cast<std::uint32_t>(position(list, event_of(from, made)));
    if (to > from ? k + 1 < list.size() && list[k + 1] < after : k > 0 && list[k - 1] > after)
        return false;
    shifted_.push_back({k, k, after});
    const std::int64_t size = p_.size_of(v);
    breaks_.push_back({from, -size});
    breaks_.push_back({to, size});
    if (k + 1 < list.size() ? !is_made(list[k + 1]) : target_[idx(v)] != 0) return true;
    breaks_.push_back({from + 1, size});  // read by nothing: there during its own step
    breaks_.push_back({to + 1, -size});
    return true;
}

void Timeline::modify(Id v, std::int32_t event, bool add) {
    const auto m = static_cast<std::int32_t>(modifications_.size());
    if (stamp_of_[idx(v)] != stamp_) {
        stamp_of_[idx(v)] = stamp_;
        touched_at_[idx(v)] = static_cast<std::int32_t>(touched_.size());
        touched_.push_back({v, m});
        modifications_.push_back({event, -1, add});
        return;
    }
    Touched& touched = touched_[idx(touched_at_[idx(v)])];
    std::int32_t before = -1, after = touched.first;
    while (after >= 0 && modifications_[idx(after)].event < event) {
        before = after;
        after = modifications_[idx(after)].next;
    }
    modifications_.push_back({event, after, add});
    (before < 0 ? touched.first : modifications_[idx(before)].next) = m;
}

void Timeline::record(const Change& c) {
    const auto inputs = p_.inputs[c.op];
    const std::size_t base = p_.inputs.start[idx(c.op)];
    for (std::size_t k = 0; k < inputs.size(); ++k)
        modify(inputs[k], event_of(c.slot, read_kind_[base + k]), c.add);
    for (Id v : p_.outputs[c.op]) modify(v, event_of(c.slot, made), c.add);
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
    for (const Change& c : changes_) record(c);
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
    std::int32_t last_change = 0, last_added = -1;
    for (std::int32_t m = touched.first; m >= 0; m = modifications_[idx(m)].next) {
        last_change = modifications_[idx(m)].event;
        if (is_made(last_change)) return false;
        if (modifications_[idx(m)].add) last_added = last_change;
    }
    const std::size_t start = position(old, modifications_[idx(touched.first)].event);
    valid = start > 0;
    if (!valid) return true;  // read before it is made
    std::size_t stop = start;
    while (stop < old.size() && !is_made(old[stop])) ++stop;
    if (stop < old.size() ? old[stop] < last_change : target_[idx(v)] != 0) return false;
    // The last read that stays: from the back, skip those that go.
    std::size_t k = stop;
    while (k > start && removed(touched, old[k - 1])) --k;
    const std::int32_t before = old[stop - 1], after = std::max(old[k - 1], last_added);
    if (after == before) return true;
    const Slot old_last = slot_of(before) - ((before & 3) == read_inplace);
    const Slot new_last = slot_of(after) - ((after & 3) == read_inplace);
    if (is_made(after) && !p_.is_once(p_.producer_of(v)))
        dead_.push_back({p_.producer_of(v), slot_of(after), false});
    if (old_last != new_last && p_.size_of(v) > 0) {
        breaks_.push_back({old_last + 1, p_.size_of(v)});
        breaks_.push_back({new_last + 1, -p_.size_of(v)});
    }
    return true;
}

bool Timeline::removed(const Touched& touched, std::int32_t event) const {
    for (std::int32_t m = touched.first; m >= 0; m = modifications_[idx(m)].next)
        if (modifications_[idx(m)].event == event) return !modifications_[idx(m)].add;
    return false;
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
    // A few dozen breaks, nearly in order.
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
    build_segments();
    excess_change_ = soft_change_ = 0;
    if (shift_ > 0) return measure_in_units();
    const BlockView view{memory_.data(), pending_.data(), maximum_.data(), block_bits_,
                         soft_line_,     budget_};
    for (const Segment& s : segments_)
        measure_range(view, s.first, s.last, s.change, soft_change_, excess_change_);
}

void Timeline::measure_in_units() {
    for (const Segment& s : segments_)
        for (Slot t = s.first; t <= s.last; ++t) {
            const std::int64_t before = memory_at(t), after = before + s.change;
            soft_change_ += over(after, soft_line_) - over(before, soft_line_);
            excess_change_ += over(after, budget_) - over(before, budget_);
        }
}

}  // namespace rekindle
