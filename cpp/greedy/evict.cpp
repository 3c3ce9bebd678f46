// The walk of evict.h. Three kinds of live values:
// - evictable: made by an op that may run again, and no input of a step that is waiting (`pins_`);
// - fixed: made by a run-once op, so it cannot come back. It stays until neither a step nor the
// return
//   of another value can want it; `release` lets it go earlier by fixing what is made from it;
// - held: what the loss leaves to the caller, and never goes. Recomputed, it is there twice.
#include "greedy/evict.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>
#include <utility>

#include "core/simulate.h"

namespace rekindle {

namespace {

constexpr std::uint8_t held = 2;  // a fixed value whose newest copy is the caller's
constexpr std::size_t never = std::numeric_limits<std::size_t>::max();
constexpr double unknown = std::numeric_limits<double>::infinity();
// Where an order runs an op again, what it made before is not wanted beyond that step.
constexpr std::size_t made_again = std::size_t{1} << 63;

}  // namespace

EvictWalk::EvictWalk(const Problem& problem, std::span<const Id> order)
    : p(problem), order_(order), recompute_cost_(problem) {
    const auto num_values = idx(p.num_values());
    use_start_.assign(num_values + 1, 0);
    std::vector<std::uint8_t> made(num_values, 0);
    for (Id i : order_) {
        for (Id v : p.inputs[i]) ++use_start_[idx(v) + 1];
        for (Id v : p.outputs[i])
            if (std::exchange(made[idx(v)], 1)) ++use_start_[idx(v) + 1];
    }
    for (std::size_t v = 0; v < num_values; ++v) use_start_[v + 1] += use_start_[v];
    uses_.resize(use_start_.back());
    auto fill = use_start_;
    std::fill(made.begin(), made.end(), 0);
    for (std::size_t t = 0; t < order_.size(); ++t) {
        for (Id v : p.inputs[order_[t]]) uses_[fill[idx(v)]++] = t;
        for (Id v : p.outputs[order_[t]])
            if (std::exchange(made[idx(v)], 1)) uses_[fill[idx(v)]++] = t | made_again;
    }
    log_wait_.resize(order_.size() + 2);
    for (std::size_t k = 1; k < log_wait_.size(); ++k)
        log_wait_[k] = std::log(static_cast<double>(k));
    log_size_.resize(num_values);
    for (std::size_t v = 0; v < num_values; ++v)
        log_size_[v] = std::log(static_cast<double>(p.size[v]));
    rest_.assign(order_.size() + 1, 0.0);
    for (std::size_t t = order_.size(); t-- > 0;)
        rest_[t] = rest_[t + 1] + static_cast<double>(p.cost_of(order_[t]));
    is_target_.assign(num_values, 0);
    for (Id v : p.targets) is_target_[idx(v)] = 1;

    // Until when v may be wanted, directly or to bring back what is made from it.
    last_need_.assign(num_values, 0);
    for (std::size_t v = 0; v < num_values; ++v) {
        if (use_start_[v] < use_start_[v + 1])
            last_need_[v] = uses_[use_start_[v + 1] - 1] & ~made_again;
        if (is_target_[v]) last_need_[v] = order_.size();
    }
    for (std::size_t t = order_.size(); t-- > 0;) {
        const Id op = order_[t];
        if (p.is_once(op)) continue;
        std::size_t need = 0;
        for (Id v : p.outputs[op]) need = std::max(need, last_need_[idx(v)]);
        for (Id v : p.inputs[op]) last_need_[idx(v)] = std::max(last_need_[idx(v)], need);
    }
}

void EvictWalk::reset() {
    const auto num_values = idx(p.num_values());
    live_.assign(num_values, 0);
    fixed_.assign(num_values, 0);
    pins_.assign(num_values, 0);
    next_use_.assign(use_start_.begin(), use_start_.end() - 1);
    alive_.clear();
    fixed_values_.clear();
    place_.assign(num_values, 0);
    projected_.assign(num_values, unknown);
    victims_.clear();
    schedule_.clear();
    used_ = 0;
    cost_ = 0;
}

Eviction EvictWalk::run(std::int64_t limit, const EvictPolicy& policy, WalkLimits most,
                        Control& control, bool host) {
    reset();
    host_ = host;
    limit_ = limit;
    policy_ = &policy;
    Eviction result;
    bool fits = true;
    for (now_ = 0; now_ < order_.size() && fits; ++now_) {
        const Id op = order_[now_];
        fits = demand(op, most, control);
        if (!fits) break;
        for (Id v : p.inputs[op]) finish(v);
        for (Id v : p.outputs[op]) finish(v);
    }
    // What must be there at the end and was evicted meanwhile.
    if (fits) {
        now_ = order_.size();
        for (Id v : p.targets) {
            fits = fits && (live_[idx(v)] || demand(p.producer_of(v), most, control));
            ++pins_[idx(v)];
        }
    }
    result.fits = fits;
    if (fits) result.schedule = drop_dead_runs(p, schedule_);
    return result;
}

// Runs `target` and before it, depth first, whatever is missing for it.
bool EvictWalk::demand(Id target, const WalkLimits& most, Control& control) {
    stack_.clear();
    stack_.push_back({target, 0});
    while (!stack_.empty()) {
        Frame& frame = stack_.back();
        const auto inputs = p.inputs[frame.op];
        if (frame.next_input < inputs.size()) {
            const Id v = inputs[frame.next_input];
            if (live_[idx(v)]) {
                ++pins_[idx(v)];
                ++frame.next_input;
            } else {
                stack_.push_back({p.producer_of(v), 0});
            }
            continue;
        }
        const Id op = frame.op;
        // A run-once op that is asked for again: its value was let go too early.
        if (schedule_.size() >= most.steps || cost_ + rest_[now_] > most.cost ||
            (stack_.size() > 1 && p.is_once(op)) || control.expired(host_) || !make_room(op))
            return false;
        execute(op);
        for (Id v : inputs) --pins_[idx(v)];
        for (Id v : dying_) drop(v);
        stack_.pop_back();
        // What was only brought back for this op and is never read again goes at once.
        if (!stack_.empty())
            for (Id v : inputs)
                if (live_[idx(v)] && evictable(v) && next_use(v, now_) == never &&
                    !helps_missing(v))
                    drop(v);
    }
    return true;
}

bool EvictWalk::evictable(Id v) const { return pins_[idx(v)] == 0 && !fixed_[idx(v)]; }

void EvictWalk::execute(Id op) {
    schedule_.push_back(op);
    cost_ += static_cast<double>(p.cost_of(op));
    if (op == p.loss)
        for (Id v : p.held) fixed_[idx(v)] = held;  // the caller keeps this copy
    for (Id v : p.outputs[op]) {
        if (fixed_[idx(v)] == held) {
            // The held copy stays, unseen from here on; the new one may come and go.
            fixed_[idx(v)] = 0;
            used_ += p.size_of(v);
            continue;
        }
        if (live_[idx(v)]) continue;  // the older copy dies, the new one takes its place
        live_[idx(v)] = 1;
        used_ += p.size_of(v);
        place_[idx(v)] = alive_.size();
        alive_.push_back(v);
        changed(v);
        // What a run-once op makes cannot come back: it stays until nothing can need it.
        if (p.is_once(op)) fix(v);
    }
}

std::size_t EvictWalk::next_use(Id v, std::size_t after) {
    auto& k = next_use_[idx(v)];
    const std::size_t end = use_start_[idx(v) + 1];
    while (k < end && (uses_[k] & ~made_again) < now_) ++k;
    std::size_t use = k;
    while (use < end && (uses_[use] & ~made_again) < after) ++use;
    if (use < end) return uses_[use] & made_again ? never : uses_[use];
    return is_target_[idx(v)] ? order_.size() : never;
}

void EvictWalk::drop(Id v) {
    live_[idx(v)] = 0;
    used_ -= p.size_of(v);
    const Id last = alive_.back();
    alive_[place_[idx(v)]] = last;
    place_[idx(last)] = place_[idx(v)];
    alive_.pop_back();
    changed(v);
}

// v came or went: what would be brought back through it has another cost now.
void EvictWalk::changed(Id v) {
    projected_[idx(v)] = unknown;
    todo_.clear();
    todo_.push_back(v);
    // Far through missing values a change matters little, and the walk over them would cost more
    // than what a slightly stale score loses.
    int visits = 24;
    while (!todo_.empty() && visits-- > 0) {
        const Id w = todo_.back();
        todo_.pop_back();
        for (Id i : p.readers[w])
            for (Id out : p.outputs[i]) {
                if (live_[idx(out)])
                    projected_[idx(out)] = unknown;
                else if (last_need_[idx(out)] > now_)
                    todo_.push_back(out);
            }
    }
}

// Whether a missing value would be brought back from v.
bool EvictWalk::helps_missing(Id v) const {
    for (Id i : p.readers[v])
        for (Id w : p.outputs[i])
            if (!live_[idx(w)] && last_need_[idx(w)] > now_) return true;
    return false;
}

// After a step of the base order: what nothing can need any more is freed.
void EvictWalk::finish(Id v) {
    if (!live_[idx(v)] || pins_[idx(v)] > 0 || is_target_[idx(v)] || fixed_[idx(v)] == held) return;
    if (next_use(v, now_ + 1) != never) return;
    if (fixed_[idx(v)] ? last_need_[idx(v)] > now_ : helps_missing(v)) return;
    drop(v);
}

// Evicts until `op` can run. Inputs that an in-place output may take over and that are not wanted
// any more (or are the cheapest to lose) are put into `dying_`: they go with this step.
bool EvictWalk::make_room(Id op) {
    dying_.clear();
    std::int64_t fresh = p.workspace[idx(op)];
    for (Id v : p.outputs[op])
        if (!live_[idx(v)] || fixed_[idx(v)] == held) fresh += p.size_of(v);  // held: a second copy
    const auto pairs = p.inplace[op];
    const bool base_step = stack_.size() == 1;
    for (std::size_t k = 0; k < pairs.size(); k += 2) {
        const Id v = pairs[k];
        if (live_[idx(pairs[k + 1])] || is_target_[idx(v)] || !may_die(v, op)) continue;
        const std::size_t after = base_step ? now_ + 1 : now_;
        if (next_use(v, after) == never && !helps_missing(v)) {
            dying_.push_back(v);
            fresh -= p.size_of(v);
        }
    }
    // What this op is about to recompute is no gain as a victim.
    for (Id v : p.outputs[op]) ++pins_[idx(v)];
    bool fits = true;
    while (fits && used_ + fresh > limit_) {
        if (release(false)) continue;
        const Id victim = choose();
        if (victim >= 0)
            drop(victim);
        else
            fits = release(true) || overwrite(op, fresh);
    }
    for (Id v : p.outputs[op]) --pins_[idx(v)];
    return fits;
}

void EvictWalk::fix(Id v) {
    fixed_[idx(v)] = 1;
    fixed_values_.push_back(v);
}

// Whether the input v of `op` may go with this step: nobody else needs it at once, it can come
// back, and it is not what the loss op leaves to the caller.
bool EvictWalk::may_die(Id v, Id op) const {
    if (pins_[idx(v)] > 1 || fixed_[idx(v)]) return false;
    return op != p.loss || std::find(p.held.begin(), p.held.end(), v) == p.held.end();
}

// Nothing else is left: an in-place output takes the place of an input that is still wanted later.
bool EvictWalk::overwrite(Id op, std::int64_t& fresh) {
    const auto pairs = p.inplace[op];
    for (std::size_t k = 0; k < pairs.size(); k += 2) {
        const Id v = pairs[k];
        if (live_[idx(pairs[k + 1])] || p.size_of(v) == 0 || !may_die(v, op)) continue;
        if (std::find(dying_.begin(), dying_.end(), v) != dying_.end()) continue;
        dying_.push_back(v);
        fresh -= p.size_of(v);
        return true;
    }
    return false;
}

// Frees a value that cannot come back and is only kept in case something made from it must be
// brought back: what is made from it is fixed in its place. Without `anyway`, only where that fixes
// no more bytes (beyond the final outputs) than it frees. The largest such value goes.
bool EvictWalk::release(bool anyway) {
    Id best = -1;
    std::erase_if(fixed_values_, [&](Id v) { return !live_[idx(v)] || fixed_[idx(v)] != 1; });
    for (Id v : fixed_values_) {
        if (is_target_[idx(v)] || pins_[idx(v)] > 0) continue;
        if (best >= 0 && p.size_of(v) <= p.size_of(best)) continue;
        if (p.size_of(v) == 0 || next_use(v, now_) != never) continue;
        if (can_release(v, anyway)) best = v;
    }
    if (best < 0) return false;
    for (Id i : p.readers[best]) {
        if (p.is_once(i)) continue;
        for (Id w : p.outputs[i])
            if (last_need_[idx(w)] >= now_ && fixed_[idx(w)] == 0) fix(w);
    }
    drop(best);
    return true;
}

bool EvictWalk::can_release(Id v, bool anyway) const {
    std::int64_t newly_fixed = 0;
    for (Id i : p.readers[v]) {
        if (p.is_once(i)) continue;  // has run (v has no next use) and never runs again
        for (Id w : p.outputs[i]) {
            if (last_need_[idx(w)] < now_) continue;
            if (!live_[idx(w)]) return false;
            if (!fixed_[idx(w)] && !is_target_[idx(w)]) newly_fixed += p.size_of(w);
        }
    }
    return anyway || newly_fixed <= p.size_of(v);
}

Id EvictWalk::choose() {
    // On large problems one look at all candidates serves several evictions.
    while (!victims_.empty()) {
        const Id v = victims_.back().value;
        victims_.pop_back();
        if (live_[idx(v)] && evictable(v)) return v;
    }
    // Scores of a batch are not looked at again as its first ones go: 1 in 512 live values at a
    // time.
    const std::size_t batch = 1 + alive_.size() / 512;
    Entry best{0, -1};
    for (Id v : alive_) {
        if (!evictable(v) || p.size_of(v) == 0) continue;
        const Entry entry{score(v), v};
        if (batch > 1)
            victims_.push_back(entry);
        else if (best.value < 0 || entry < best)
            best = entry;
    }
    if (batch == 1) return best.value;
    if (victims_.empty()) return -1;
    const std::size_t count = std::min(batch, victims_.size());
    std::partial_sort(victims_.begin(), victims_.begin() + static_cast<std::ptrdiff_t>(count),
                      victims_.end());
    victims_.resize(count);
    std::reverse(victims_.begin(), victims_.end());
    const Id v = victims_.back().value;
    victims_.pop_back();
    return v;
}

double EvictWalk::score(Id v) {
    const std::size_t next = next_use(v, now_);
    if (next == never && !helps_missing(v)) return -unknown;
    // Kept only to bring something else back: it waits longer than anything with a next use.
    const double wait = next == never ? log_wait_.back() + std::numbers::ln2
                                      : log_wait_[next - std::min(next, now_) + 1];
    double& projected = projected_[idx(v)];
    // The 1e-9 keeps the logarithm of ops that cost nothing finite; they go first all the same.
    if (projected == unknown) projected = std::log(recompute_cost_.of(v, live_, 24) + 1e-9);
    const double value =
        policy_->cost_power * projected - log_size_[idx(v)] - policy_->wait_power * wait;
    return policy_->weight.empty() ? value : value + policy_->weight[idx(v)];
}

Eviction evict(const Problem& problem, std::span<const Id> order, std::int64_t limit,
               std::size_t max_steps, Control& control) {
    return EvictWalk(problem, order).run(limit, EvictPolicy{}, {max_steps}, control);
}

}  // namespace rekindle
