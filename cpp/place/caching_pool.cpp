#include "place/caching_pool.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <utility>

#include "core/random.h"

namespace rekindle {

namespace {

constexpr std::int64_t mib = std::int64_t{1} << 20;
constexpr std::int64_t round_bytes = 512;
constexpr std::int64_t small_bytes = mib;       // requests up to here are small
constexpr std::int64_t own_segment = 10 * mib;  // requests from here on get one of their own
constexpr std::int64_t segment_step = 2 * mib;  // whose size is a multiple of this
constexpr std::int64_t small_segment = 2 * mib;
constexpr std::int64_t address_space = std::int64_t{1} << 43;  // between two segments
constexpr std::int32_t most_tries = 400;  // sizes of an arena: a tenth of a second for large steps

std::int64_t up(std::int64_t value, std::int64_t multiple) {
    return (value + multiple - 1) / multiple * multiple;
}

std::int64_t segment_bytes(const PoolRules& rules, std::int64_t size, bool is_small) {
    if (is_small) return small_segment;
    return size < own_segment ? rules.large_segment : up(size, segment_step);
}

}  // namespace

std::int64_t CachingPool::rounded(std::int64_t request) const {
    if (rules_.divisions > 1 && request > round_bytes * rules_.divisions) {
        const auto power =
            static_cast<std::int64_t>(std::bit_floor(static_cast<std::uint64_t>(request)));
        if (power == request) return request;
        const std::int64_t share = std::max<std::int64_t>(power / rules_.divisions, 1);
        return power + up(request - power, share);
    }
    return std::max(round_bytes, up(request, round_bytes));
}

void CachingPool::reserve(std::int64_t bytes) {
    remember(make({bytes, num_segments_++ * address_space, -1, -1, State::free, false}));
    reserved_[0] += bytes;
}

std::int32_t CachingPool::allocate(std::int64_t request) {
    const std::int64_t size = rounded(request);
    const bool is_small = size <= small_bytes;
    std::int32_t id = best_fit(size, is_small);
    if (id < 0)
        id = rules_.expandable ? expand(size, is_small) : new_segment(size, is_small);
    else
        forget(id);
    const std::int64_t rest = at(id).size - size;
    const bool splits = is_small || rules_.expandable
                            ? rest >= round_bytes
                            : size < rules_.max_split && rest > small_bytes;
    if (splits) split(id, size);
    at(id).state = State::used;
    allocated_ += at(id).size;
    peak_allocated_ = std::max(peak_allocated_, allocated_);
    return id;
}

void CachingPool::release(std::int32_t id) {
    allocated_ -= at(id).size;
    at(id).state = State::free;
    for (const std::int32_t neighbour : {at(id).before, at(id).after}) {
        if (neighbour < 0 || at(neighbour).state != State::free) continue;
        forget(neighbour);
        merge_into(id, neighbour);
    }
    remember(id);
}

std::int32_t CachingPool::best_fit(std::int64_t size, bool is_small) const {
    const Free& free = free_[is_small];
    auto it = free.lower_bound({size, -1, -1});
    if (it == free.end()) return -1;
    if (rules_.expandable) {
        // The block before the unmapped end counts with what it can become.
        const auto room = [this](std::int32_t id) {
            const std::int32_t after = at(id).after;
            const bool grows = after >= 0 && at(after).state == State::unmapped;
            return at(id).size + (grows ? at(after).size : 0);
        };
        const auto is_split = [this](std::int32_t id) {
            return at(id).before >= 0 || at(id).after >= 0;
        };
        for (auto next = std::next(it); is_split(std::get<2>(*it)) && next != free.end() &&
                                        room(std::get<2>(*next)) < room(std::get<2>(*it));)
            it = next++;
    }
    const std::int64_t found = std::get<0>(*it);
    if (size < rules_.max_split ? found >= rules_.max_split : found >= size + rules_.max_rounding)
        return -1;
    return std::get<2>(*it);
}

std::int32_t CachingPool::new_segment(std::int64_t size, bool is_small) {
    const std::int64_t bytes = segment_bytes(rules_, size, is_small);
    reserved_[is_small] += bytes;
    return make({bytes, num_segments_++ * address_space, -1, -1, State::free, is_small});
}

std::int32_t CachingPool::expand(std::int64_t size, bool is_small) {
    const std::int64_t unit = is_small ? small_segment : rules_.large_segment;
    if (tail_[is_small] < 0)
        tail_[is_small] = make({address_space / 2, num_segments_++ * address_space, -1, -1,
                                State::unmapped, is_small});
    const std::int32_t tail = tail_[is_small], before = at(tail).before;
    std::int64_t there = 0;
    if (before >= 0 && at(before).state == State::free) there = at(before).size;
    const std::int64_t more = up(size - there, unit);
    reserved_[is_small] += more;
    at(tail).size -= more;
    at(tail).address += more;
    if (there > 0) {
        forget(before);
        at(before).size += more;
        return before;
    }
    const std::int32_t id =
        make({more, at(tail).address - more, before, tail, State::free, is_small});
    at(tail).before = id;
    if (before >= 0) at(before).after = id;
    return id;
}

std::int32_t CachingPool::make(const Block& block) {
    if (spare_.empty()) {
        blocks_.push_back(block);
        return static_cast<std::int32_t>(blocks_.size()) - 1;
    }
    const std::int32_t id = spare_.back();
    spare_.pop_back();
    at(id) = block;
    return id;
}

void CachingPool::split(std::int32_t id, std::int64_t size) {
    const Block whole = at(id);
    const std::int32_t rest = make(
        {whole.size - size, whole.address + size, id, whole.after, State::free, whole.is_small});
    at(id).size = size;
    at(id).after = rest;
    if (whole.after >= 0) at(whole.after).before = rest;
    remember(rest);
}

void CachingPool::merge_into(std::int32_t id, std::int32_t neighbour) {
    Block& block = at(id);
    const Block& other = at(neighbour);
    block.size += other.size;
    if (neighbour == block.before) {
        block.address = other.address;
        block.before = other.before;
        if (block.before >= 0) at(block.before).after = id;
    } else {
        block.after = other.after;
        if (block.after >= 0) at(block.after).before = id;
    }
    spare_.push_back(neighbour);
}

void CachingPool::remember(std::int32_t id) {
    free_[at(id).is_small].insert({at(id).size, at(id).address, id});
}

void CachingPool::forget(std::int32_t id) {
    free_[at(id).is_small].erase({at(id).size, at(id).address, id});
}

bool are_valid(const PoolEvents& events) {
    std::vector<char> is_live;
    for (const std::int64_t event : events) {
        if (event > 0) {
            is_live.push_back(1);
        } else {
            const auto which = static_cast<std::size_t>(-(event + 1));
            if (event == 0 || which >= is_live.size() || !is_live[which]) return false;
            is_live[which] = 0;
        }
    }
    return true;
}

namespace {

constexpr std::int64_t no_limit = std::numeric_limits<std::int64_t>::max();

// Plays the events once; false as soon as more large segments than `limit` bytes are there.
bool play(CachingPool& pool, const PoolEvents& events, std::int64_t limit, std::int64_t& peak,
          std::int64_t& num_played) {
    std::vector<std::int32_t> blocks;
    blocks.reserve(events.size());
    for (const std::int64_t event : events) {
        ++num_played;
        if (event > 0) {
            blocks.push_back(pool.allocate(event));
            peak = std::max(peak, pool.reserved());
            if (pool.large_reserved() > limit) return false;
        } else {
            auto& block = blocks[static_cast<std::size_t>(-(event + 1))];
            pool.release(block);
            block = -1;
        }
    }
    for (const std::int32_t block : blocks)
        if (block >= 0) pool.release(block);
    return true;
}

// A search for segments that serve the large requests of some events.
class ArenaSearch {
   public:
    ArenaSearch(const PoolRules& rules, const PoolEvents& events, std::int64_t num_events,
                std::uint64_t seed)
        : rules_(rules), num_left_(num_events), random_(seed) {
        // Small requests have a pool of their own, which is never too small.
        const CachingPool pool(rules);
        std::vector<std::int64_t> number{0};
        std::int64_t live = 0, count = 0;
        std::vector<std::int64_t> sizes{0};
        for (const std::int64_t event : events) {
            if (event > 0) {
                const std::int64_t size = pool.rounded(event);
                const bool is_large = size > small_bytes;
                number.push_back(is_large ? ++count : 0);
                sizes.push_back(is_large ? size : 0);
                live += sizes.back();
                most_live_ = std::max(most_live_, live);
                if (is_large) {
                    large_.push_back(event);
                    units_.push_back(up(size, segment_step));
                }
            } else {
                const auto which = static_cast<std::size_t>(-event);
                live -= sizes[which];
                if (number[which] > 0) large_.push_back(-number[which]);
            }
        }
        std::sort(units_.begin(), units_.end());
        units_.erase(std::unique(units_.begin(), units_.end()), units_.end());
    }

    std::vector<std::int64_t> run() {
        if (units_.empty()) return {};
        best_ = {one_segment()};
        const std::int64_t least = up(most_live_, segment_step);
        while (num_left_ > 0 && sum(best_) > least) {
            std::vector<std::int64_t> next = changed(least);
            if (!next.empty() && serve(next)) best_ = std::move(next);
        }
        return best_;
    }

   private:
    static std::int64_t sum(const std::vector<std::int64_t>& sizes) {
        std::int64_t total = 0;
        for (const std::int64_t size : sizes) total += size;
        return total;
    }

    bool serve(const std::vector<std::int64_t>& segments) {
        CachingPool pool(rules_);
        for (const std::int64_t size : segments) pool.reserve(size);
        std::int64_t peak = 0, played = 0;
        const bool enough = play(pool, large_, pool.large_reserved(), peak, played);
        num_left_ -= played;
        return enough;
    }

    std::int64_t one_segment() {
        PoolRules rules = rules_;
        rules.expandable = true;
        CachingPool endless(rules);
        std::int64_t peak = 0, played = 0;
        play(endless, large_, no_limit, peak, played);
        const std::int64_t low = up(most_live_, segment_step);
        const std::int64_t high = std::max(low, endless.large_reserved());
        const std::int64_t step =
            std::max(segment_step, up((high - low) / most_tries, segment_step));
        // Blocks of a segment may keep up to 1 MiB more than was asked for, which those of the
        // range without an end do not: what it needed may fall short by some of these.
        for (std::int64_t size = low;; size += step)
            if (serve({size})) return size;
    }

    // Segments of less in all: anew, of the sizes of blocks or cut at random; or the best with
    // bytes moved between two of them.
    std::vector<std::int64_t> changed(std::int64_t least) {
        const std::int64_t now = sum(best_) / segment_step;
        const double share = random_.unit();
        auto fewer =
            static_cast<std::int64_t>(share * share * share * 0.05 * static_cast<double>(now));
        fewer = std::clamp<std::int64_t>(fewer, 1, now - least / segment_step);
        const std::int64_t total = now - fewer;  // in steps, as all below
        std::vector<std::int64_t> found;
        if (best_.size() > 1 && random_.chance(0.25)) {
            for (const std::int64_t size : best_) found.push_back(size / segment_step);
            const auto from = pick(found.size()), to = pick(found.size());
            const std::int64_t moved = 1 + random_.below(60);
            found[from] -= moved + fewer;
            found[to] += moved;
        } else {
            const bool by_size = random_.chance(0.66);
            std::int64_t left = total;
            for (std::int32_t i = random_.below(4); i > 0 && left > 1; --i) {
                const std::int64_t part =
                    by_size ? units_[pick(units_.size())] / segment_step * multiples[pick(6)]
                            : 1 + random_.below(static_cast<std::int32_t>(left - 1));
                if (part >= left) continue;
                found.push_back(part);
                left -= part;
            }
            found.push_back(left);
        }
        for (std::int64_t& size : found) {
            if (size <= 0) return {};
            size *= segment_step;
        }
        return found;
    }

    std::size_t pick(std::size_t num) {
        return static_cast<std::size_t>(random_.below(static_cast<std::int32_t>(num)));
    }

    static constexpr std::int64_t multiples[] = {1, 1, 2, 3, 4, 8};

    const PoolRules& rules_;
    PoolEvents large_;                 // the events of large requests alone
    std::vector<std::int64_t> units_;  // their sizes, each once
    std::int64_t most_live_ = 0;
    std::int64_t num_left_;
    Random random_;
    std::vector<std::int64_t> best_;
};

}  // namespace

Replay replay(const PoolRules& rules, const std::vector<std::int64_t>& arena,
              const std::vector<std::int64_t>& held, const PoolEvents& events,
              std::int32_t repeats) {
    CachingPool pool(rules);
    for (const std::int64_t bytes : held)
        if (bytes > 0) pool.allocate(bytes);
    Replay result{pool.allocated(), pool.reserved(), 0, 0, 0};
    for (const std::int64_t bytes : arena) pool.reserve(bytes);
    result.peak_reserved = pool.reserved();
    pool.forget_peak();
    std::int64_t num_played = 0;
    for (std::int32_t i = 0; i < repeats; ++i)
        play(pool, events, no_limit, result.peak_reserved, num_played);
    result.peak_allocated = pool.peak_allocated();
    result.large_reserved = pool.large_reserved();
    return result;
}

std::vector<std::int64_t> best_arena(const PoolRules& rules, const PoolEvents& events,
                                     std::int64_t num_events, std::uint64_t seed) {
    return ArenaSearch(rules, events, num_events, seed).run();
}

}  // namespace rekindle
