// How the moves are drawn. A proposal that is invalid or senseless costs nearly as much as a good
// one, so each kind looks for a place where it can be valid: reads after what is made, in empty
// slots.
#include "anneal/moves.h"

#include <algorithm>
#include <bit>

namespace rekindle {

namespace {

constexpr int max_depth = 6;

}  // namespace

Moves::Moves(const Problem& problem, Timeline& timeline, Random& random, bool reorder_only,
             bool paper_moves)
    : p_(problem), line_(timeline), random_(random) {
    // Per cent.
    //                                   shift chain recompute relieve forget exchange add rotate
    std::array<std::uint32_t, num_kinds> weights{30, 15, 15, 10, 15, 10, 0, 5};
    if (paper_moves) weights = {0, 0, 0, 0, 33, 0, 33, 34};
    if (reorder_only) weights = {60, 35, 0, 0, 0, 0, 0, 5};
    if (reorder_only && paper_moves) weights = {0, 0, 0, 0, 0, 0, 0, 100};
    std::uint32_t sum = 0;
    for (std::size_t k = 0; k < num_kinds; ++k) until_[k] = sum += weights[k];
}

Moves::Kind Moves::choose() {
    const auto x =
        static_cast<std::uint32_t>(random_.below(static_cast<std::int32_t>(until_[num_kinds - 1])));
    std::size_t k = 0;
    while (x >= until_[k]) ++k;
    return static_cast<Kind>(k);
}

bool Moves::propose(Kind kind) {
    line_.begin();
    added_ = Timeline::none;
    switch (kind) {
        case shift: return propose_shift();
        case chain: return propose_chain();
        case recompute: return propose_recompute();
        case relieve: return propose_relieve(over_budget_step());
        case forget: return propose_forget();
        case exchange: return propose_exchange();
        case add: return propose_add();
        case rotate: return propose_rotate();
    }
    return false;
}

Slot Moves::random_step() {
    for (;;) {
        const Slot t = random_slot();
        if (line_.op_at(t) >= 0) return t;
    }
}

Slot Moves::random_slot() {
    // One in four anywhere, even where one stretch is heated: room found there is used elsewhere.
    if (low_ >= high_ || random_.below(4) == 0) return random_.below(line_.num_slots());
    return low_ + random_.below(high_ - low_);
}

// A slot in (low, high), more often near `from`: the distance is uniform in its logarithm.
Slot Moves::random_near(Slot from, Slot low, Slot high) {
    const Slot down = from - low - 1, up = high - from - 1;
    if (down <= 0 && up <= 0) return from;
    bool later = up > 0 && (down <= 0 || random_.next() >> 63);
    const Slot reach = later ? up : down;
    const int bits = std::bit_width(static_cast<std::uint32_t>(reach));
    const Slot most = std::min(reach, static_cast<Slot>(1) << (1 + random_.below(bits)));
    const Slot distance = 1 + random_.below(most);
    return later ? from + distance : from - distance;
}

// Between the copies that the step reads and the first read of what it makes.
void Moves::window(Id op, Slot t, Slot& low, Slot& high) const {
    low = last_made(op, t, line_.num_slots());
    high = first_read(op, t);
}

Slot Moves::first_read(Id op, Slot t) const {
    Slot high = line_.num_slots();
    for (Id v : p_.outputs[op]) {
        const Slot read = line_.read_after(v, t);
        if (read != Timeline::none) high = std::min(high, read);
    }
    return high;
}

// The latest copy that the step reads; `enough` or later is late enough to stop looking.
Slot Moves::last_made(Id op, Slot t, Slot enough) const {
    Slot low = Timeline::none;
    for (Id v : p_.inputs[op]) {
        low = std::max(low, line_.made_before(v, t));
        if (low >= enough) break;
    }
    return low;
}

// A step whose place is to change, and where it would go: half the time any step, else one that
// can cross a step above the soft line, where memory counts.
bool Moves::aim(Slot& from, Slot& low, Slot& high) {
    if (random_.next() >> 63) {
        const Slot hot = hot_step();
        for (int tries = 0; hot != Timeline::none && tries < 8; ++tries) {
            from = random_near(hot, Timeline::none, line_.num_slots());
            const Id op = line_.op_at(from);
            if (op < 0) continue;
            if (from == hot) {
                window(op, from, low, high);
            } else if (from < hot) {
                high = first_read(op, from);
                if (high <= hot) continue;
                low = hot;
            } else {
                low = last_made(op, from, hot);
                if (low >= hot) continue;
                high = hot;
            }
            return true;
        }
    }
    from = random_step();
    window(line_.op_at(from), from, low, high);
    return true;
}

Slot Moves::hot_step() {
    if (line_.soft() == 0) return Timeline::none;
    for (int tries = 0; tries < 12; ++tries) {
        const Slot t = random_slot();
        if (line_.memory_at(t) > line_.soft_line()) return t;
    }
    return Timeline::none;
}

bool Moves::propose_shift() {
    Slot from, low, high;
    aim(from, low, high);
    Slot to;
    switch (random_.below(4)) {
        case 0: to = line_.free_before(high, low); break;
        case 1: to = line_.free_after(low, high); break;
        default: {
            const Slot near = random_near(std::clamp(from, low, high), low, high);
            to = line_.free_before(near + 1, low);
            if (to == Timeline::none) to = line_.free_after(near, high);
        }
    }
    if (to == Timeline::none) return false;
    const Id op = line_.op_at(from);
    line_.take(from);
    line_.put(op, to);
    return true;
}

bool Moves::propose_chain() {
    Slot from, low, high;
    aim(from, low, high);
    const bool later = low >= from ? true : high <= from ? false : random_.next() >> 63;
    Slot cursor;
    if (later) {
        low = std::max(low, from);
        if (random_.next() >> 63) high = random_near(low, low, high) + 1;
        cursor = line_.free_before(high, low);
    } else {
        high = std::min(high, from);
        if (random_.next() >> 63) low = random_near(high, low, high) - 1;
        cursor = line_.free_after(low, high);
    }
    if (cursor == Timeline::none) return false;
    const Id op = line_.op_at(from);
    line_.take(from);
    line_.put(op, cursor);
    if (later)
        follow_inputs(op, from, cursor, 0);
    else
        follow_readers(op, from, cursor, 0);
    return true;
}

// The steps whose outputs only this one reads come along, to just before it.
void Moves::follow_inputs(Id op, Slot from, Slot& cursor, int depth) {
    if (depth == max_depth) return;
    for (Id v : p_.inputs[op]) {
        const Slot made = line_.made_before(v, from);
        const Id producer = p_.producer_of(v);
        if (made == Timeline::none || line_.full(2) || random_.below(4) == 0) continue;
        if (line_.planned(made)) continue;
        // A run that something else reads too must stay before that reader, so it stays where it
        // is.
        bool serves_only = true;
        for (Id w : p_.outputs[producer])
            serves_only = serves_only && line_.num_reads(w, made) == (w == v ? 1 : 0);
        if (!serves_only) continue;
        const Slot to = line_.free_before(cursor, made);
        if (to == Timeline::none) continue;
        line_.take(made);
        line_.put(producer, to);
        cursor = to;
        follow_inputs(producer, made, cursor, depth + 1);
    }
}

// The first readers whose other inputs are there come along, to just after it.
void Moves::follow_readers(Id op, Slot from, Slot& cursor, int depth) {
    if (depth == max_depth) return;
    for (Id v : p_.outputs[op]) {
        const Slot read = line_.read_after(v, from);
        if (read == Timeline::none || line_.full(2) || random_.below(4) == 0) continue;
        if (line_.planned(read)) continue;
        const Id reader = line_.op_at(read);
        bool ready = true;
        for (Id w : p_.inputs[reader])
            ready = ready && (p_.producer_of(w) == op || line_.made_before(w, read) < cursor);
        if (!ready) continue;
        const Slot to = line_.free_after(cursor, read);
        if (to == Timeline::none) continue;
        line_.take(read);
        line_.put(reader, to);
        cursor = to;
        follow_readers(reader, read, cursor, depth + 1);
    }
}

bool Moves::propose_recompute() {
    if (!p_.targets.empty() && random_.below(16) == 0) {  // the end of the schedule reads too
        const Id v = p_.targets[idx(random_.below(static_cast<std::int32_t>(p_.targets.size())))];
        const Slot end = line_.num_slots();
        return remake(v, end, line_.last_read_before(v, end));
    }
    const Slot reader = random_step();
    const auto inputs = p_.inputs[line_.op_at(reader)];
    if (inputs.empty()) return false;
    const Id v = inputs[idx(random_.below(static_cast<std::int32_t>(inputs.size())))];
    return remake(v, reader, line_.last_read_before(v, reader));
}

Slot Moves::over_budget_step() {
    if (line_.excess() == 0) return Timeline::none;
    for (int tries = 0; tries < 24; ++tries) {
        const Slot t = random_slot();
        if (line_.memory_at(t) > line_.budget()) return t;
    }
    return line_.peak_slot();
}

// Recomputes, before its next read, a value that lies idle across `over`.
bool Moves::propose_relieve(Slot over) {
    if (over == Timeline::none) return false;
    const Slot last = line_.num_slots() - over - 1;
    if (last <= 0) return false;
    for (int tries = 0; tries < 24; ++tries) {
        const Slot reader = random_near(over, over, line_.num_slots());
        const Id op = line_.op_at(reader);
        if (op < 0) continue;
        const auto inputs = p_.inputs[op];
        if (inputs.empty()) continue;
        const Id v = inputs[idx(random_.below(static_cast<std::int32_t>(inputs.size())))];
        const Slot before = line_.last_read_before(v, reader);
        if (before < over && remake(v, reader, std::max(before, over))) return true;
    }
    return false;
}

// Runs v's producer in (low, before), most often right before; what it reads and is gone may be
// recomputed too, or kept until there.
bool Moves::remake(Id v, Slot before, Slot low) {
    const Id producer = p_.producer_of(v);
    if (p_.is_once(producer) || low == Timeline::none) return false;
    Slot at = before;
    if (random_.below(4) == 0 && before - low > 2) at = low + 2 + random_.below(before - low - 2);
    Slot cursor = line_.free_before(at, low);
    if (cursor == Timeline::none) return false;
    line_.put(producer, cursor);
    added_ = producer;
    added_at_ = cursor;
    // Half the time alone; else with few, seldom with many others.
    int most = std::min(std::countl_zero(random_.next()), 5);
    most = most == 0 ? 0 : 1 << (most - 1);
    if (most > 0) supply(producer, cursor, cursor, most);
    return true;
}

void Moves::supply(Id op, Slot at, Slot& cursor, int& most) {
    for (Id w : p_.inputs[op]) {
        if (most == 0 || line_.full(1)) return;
        const Id producer = p_.producer_of(w);
        if (p_.is_once(producer) || random_.below(4) == 0 || line_.lives_at(w, at)) continue;
        const Slot low = line_.made_before(w, at);
        if (low == Timeline::none) continue;
        const Slot to = line_.free_before(cursor, low);
        if (to == Timeline::none) continue;
        line_.put(producer, to);
        cursor = to;
        --most;
        supply(producer, to, cursor, most);
    }
}

bool Moves::propose_forget() {
    const auto repeated = line_.repeated();
    if (repeated.empty()) return false;
    const Id op = repeated[idx(random_.below(static_cast<std::int32_t>(repeated.size())))];
    const std::int32_t k = random_.below(line_.runs(op));
    const Slot run = line_.run_of(op, k);
    // What the first run makes is read before the second: there is nothing to read instead.
    // All runs of an op make the same values, so any may go but the first one that is read.
    if (k == 0 && std::ranges::any_of(p_.outputs[op], [&](Id v) {
            return line_.read_after(v, run) != Timeline::none;
        }))
        return false;
    line_.take(run);
    return true;
}

bool Moves::propose_exchange() {
    const auto repeated = line_.repeated();
    if (repeated.empty()) return false;
    const Id op = repeated[idx(random_.below(static_cast<std::int32_t>(repeated.size())))];
    const Slot run = line_.run_of(op, 1 + random_.below(line_.runs(op) - 1));
    const Slot before = line_.last_read_before(p_.outputs[op][0], run);
    if (before == Timeline::none || run - before < 2) return false;
    line_.take(run);
    return propose_relieve(before + 1 + random_.below(run - before - 1));
}

bool Moves::propose_add() {
    const Id op = random_.below(p_.num_ops());
    if (p_.is_once(op)) return false;
    const Slot t = random_.below(line_.num_slots());
    if (line_.op_at(t) != Timeline::none) return false;
    line_.put(op, t);
    return true;
}

bool Moves::propose_rotate() {
    const Slot from = random_step();
    const Slot to = random_.below(line_.num_slots());
    if (line_.op_at(to) != Timeline::none) return false;
    const Id op = line_.op_at(from);
    line_.take(from);
    line_.put(op, to);
    return true;
}

}  // namespace rekindle
