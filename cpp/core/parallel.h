// Independent searches, one per seed, on a few threads.
//
// The calling thread takes part, as `host`: only it may ask Python about signals (Control). Which
// thread takes which seed is open, so a search must depend on nothing but its seed; then results
// are the same for every number of threads.
#pragma once

#include <atomic>
#include <cstddef>
#include <thread>
#include <vector>

namespace rekindle {

// Calls search(k, host) once for each k below `num_seeds`; returns when all have ended.
template <typename Search>
void search_each_seed(std::size_t num_seeds, int num_threads, const Search& search) {
    std::atomic<std::size_t> next{0};
    const auto work = [&](bool host) {
        for (std::size_t k = next++; k < num_seeds; k = next++) search(k, host);
    };
    std::vector<std::jthread> others;  // joined on the way out
    for (int t = 1; t < num_threads; ++t) others.emplace_back(work, false);
    work(true);
}

}  // namespace rekindle
