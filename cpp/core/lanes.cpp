// Time is apart from memory: the peaks never depend on how long anything takes, because a schedule
// says itself where it waits (drop, release). So this account runs over schedules that are known to
// be valid, and need not look whether a copy is where a step wants it.
#include "core/lanes.h"

#include <algorithm>
#include <utility>

namespace rekindle {

namespace {

constexpr std::int64_t kTooLate = std::int64_t{1} << 62;
constexpr std::int64_t kNsPerSecond = 1'000'000'000;

class Clock {
   public:
    Clock(const Problem& p, std::size_t num_steps) : p_(p), link_(*p.link) {
        const std::size_t n = idx(p.num_values());
        arrival_.assign(n, 0);
        sent_.assign(n, 0);
        on_host_.assign(n, 0);
        last_fetch_.assign(n, 0);
        counted_.assign(n, 0);
        lanes.start.reserve(num_steps);
        lanes.finish.reserve(num_steps);
    }

    // Both say whether all times are still below 2^62.
    bool op(Id i) {
        std::int64_t begin = lanes.compute;
        for (Id v : p_.inputs[i]) begin = std::max(begin, arrival_[idx(v)]);
        for (Id v : p_.outputs[i]) arrival_[idx(v)] = 0;
        lanes.compute = begin + p_.cost_of(i);
        serial_ += p_.cost_of(i);
        return step(begin, lanes.compute);
    }

    bool transfer(const Transfer& move) {
        const std::size_t v = idx(move.value);
        switch (move.kind) {
            case Transfer::Kind::send: {
                const auto ns = transfer_ns(link_, p_.size[v], link_.to_host);
                if (!ns) return false;
                const std::int64_t begin = std::max({lanes.to_host, lanes.compute, arrival_[v]});
                lanes.to_host = sent_[v] = on_host_[v] = begin + *ns;
                last_fetch_[v] = 0;
                // The paper's objective counts the first send alone: what is sent again could have
                // stayed on the host.
                if (!counted_[v]) serial_ += *ns;
                counted_[v] = 1;
                return step(begin, lanes.to_host);
            }
            case Transfer::Kind::drop: {
                const std::int64_t begin = lanes.compute;
                lanes.compute = std::max(begin, sent_[v]);
                return step(begin, lanes.compute);
            }
            case Transfer::Kind::fetch: {
                const auto ns = transfer_ns(link_, p_.size[v], link_.from_host);
                if (!ns) return false;
                const std::int64_t begin = std::max({lanes.from_host, lanes.compute, on_host_[v]});
                lanes.from_host = arrival_[v] = last_fetch_[v] = begin + *ns;
                serial_ += *ns;
                return step(begin, lanes.from_host);
            }
            case Transfer::Kind::release: {
                const std::int64_t begin = lanes.to_host;
                lanes.to_host = std::max(begin, last_fetch_[v]);
                return step(begin, lanes.to_host);
            }
        }
        return false;
    }

    void end() {
        lanes.cost =
            link_.serial ? serial_ : std::max({lanes.compute, lanes.to_host, lanes.from_host});
    }

    Lanes lanes;

   private:
    // A step adds less than 2^62 to what is below it, so nothing overflows before it is seen.
    bool step(std::int64_t begin, std::int64_t finish) {
        lanes.start.push_back(begin);
        lanes.finish.push_back(finish);
        return finish < kTooLate && serial_ < kTooLate;
    }

    const Problem& p_;
    const HostLink& link_;
    std::int64_t serial_ = 0;
    // Per value. Its newest copy alone is ever read, sent or dropped.
    std::vector<std::int64_t> arrival_;     // of the newest device copy; 0 where an op made it
    std::vector<std::int64_t> sent_;        // when the newest device copy's send is done
    std::vector<std::int64_t> on_host_;     // when the host copy is complete
    std::vector<std::int64_t> last_fetch_;  // when the last fetch of the host copy has arrived
    std::vector<std::uint8_t> counted_;     // whether `serial_` has its send
};

}  // namespace

std::optional<std::int64_t> transfer_ns(const HostLink& link, std::int64_t bytes,
                                        std::int64_t rate) {
    // Bytes times 10^9 needs 92 bits.
    __extension__ using Wide = unsigned __int128;
    const Wide rounded_up =
        (static_cast<Wide>(bytes) * static_cast<Wide>(kNsPerSecond) + static_cast<Wide>(rate) - 1) /
        static_cast<Wide>(rate);
    const Wide all = rounded_up + static_cast<Wide>(link.latency);
    if (all >= static_cast<Wide>(kTooLate)) return std::nullopt;
    return static_cast<std::int64_t>(all);
}

Lanes time_lanes(const Problem& p, std::span<const Id> schedule,
                 std::span<const Transfer> transfers) {
    Clock clock(p, schedule.size() + transfers.size());
    const std::size_t num_steps = schedule.size() + transfers.size();
    std::size_t next = 0;
    for (std::size_t t = 0; t < num_steps; ++t) {
        const bool moves = next < transfers.size() && transfers[next].before == t - next;
        if (moves ? !clock.transfer(transfers[next++]) : !clock.op(schedule[t - next])) {
            clock.lanes.too_late = t;
            break;
        }
    }
    clock.end();
    return std::move(clock.lanes);
}

}  // namespace rekindle
