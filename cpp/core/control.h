// How a long native search is limited and interrupted. A poll reads the clock (tens of nanoseconds;
// call it once in some dozens of moves where a move is faster), the host (signals, progress) is
// asked at most every 50 ms.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>

namespace rekindle {

struct Control {
    using Clock = std::chrono::steady_clock;

    Clock::time_point start = Clock::now();
    double time_limit_s = 1e18;
    std::function<bool()>
        interrupted;  // called from the thread that entered the core; may be empty
    std::atomic<bool> stop{false};
    bool was_interrupted = false;  // read it after the search, on the thread that entered

    double elapsed_s() const { return std::chrono::duration<double>(Clock::now() - start).count(); }

    // True when the search must end now. `host` says that this thread may call `interrupted`.
    bool expired(bool host = true) {
        // `stop` guards no data, so relaxed is enough: a thread that sees it late works a little
        // longer.
        if (stop.load(std::memory_order_relaxed)) return true;
        const double now = elapsed_s();
        if (now > time_limit_s) {
            stop = true;
        } else if (host && interrupted && now - last_poll_s > 0.05) {
            last_poll_s = now;
            if (interrupted()) stop = was_interrupted = true;
        }
        return stop.load(std::memory_order_relaxed);
    }

   private:
    double last_poll_s = 0;
};

}  // namespace rekindle
