// A small fast generator (xoshiro256++ by Blackman and Vigna, seeded by splitmix64): the same stream
// on every platform, so the same seed gives the same schedule.
#pragma once

#include <array>
#include <bit>
#include <cmath>
#include <cstdint>

namespace rekindle {

class Random {
   public:
    explicit Random(std::uint64_t seed) {
        for (auto& word : state_) {
            seed += 0x9e3779b97f4a7c15ULL;
            std::uint64_t z = seed;
            z = (z ^ (z >> 30U)) * 0xbf58476d1ce4e5b9ULL;
            z = (z ^ (z >> 27U)) * 0x94d049bb133111ebULL;
            word = z ^ (z >> 31U);
        }
    }

    std::uint64_t next() {
        const std::uint64_t result = std::rotl(state_[0] + state_[3], 23) + state_[0];
        const std::uint64_t t = state_[1] << 17U;
        state_[2] ^= state_[0];
        state_[3] ^= state_[1];
        state_[1] ^= state_[2];
        state_[0] ^= state_[3];
        state_[2] ^= t;
        state_[3] = std::rotl(state_[3], 45);
        return result;
    }

    // In [0, bound); the bias is below 2^-32 for the bounds used here.
    std::uint64_t below(std::uint64_t bound) { return ((next() >> 32U) * bound) >> 32U; }

    double uniform() { return static_cast<double>(next() >> 11U) * 0x1.0p-53; }

    double normal() {
        double u = 0;
        do u = uniform();
        while (u <= 0);
        return std::sqrt(-2.0 * std::log(u)) * std::cos(6.283185307179586 * uniform());
    }

   private:
    std::array<std::uint64_t, 4> state_{};
};

}  // namespace rekindle
