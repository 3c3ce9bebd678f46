// xoshiro256++ (Blackman and Vigna, public domain algorithm), seeded by splitmix64: a few cycles a
// number and the same stream on every platform, which std:: distributions do not promise.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

namespace rekindle {

class Random {
   public:
    explicit Random(std::uint64_t seed) {
        for (auto& word : state_) {
            seed += 0x9e3779b97f4a7c15ULL;
            std::uint64_t z = seed;
            z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
            z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
            word = z ^ (z >> 31);
        }
        // -ln(u) at the middle of 4096 equal parts: acceptance needs no logarithm per move.
        exponential_.resize(4096);
        for (std::size_t i = 0; i < exponential_.size(); ++i)
            exponential_[i] = -std::log((static_cast<double>(i) + 0.5) / 4096.0);
    }

    std::uint64_t next() {
        const std::uint64_t result = rotate(state_[0] + state_[3], 23) + state_[0];
        const std::uint64_t t = state_[1] << 17;
        state_[2] ^= state_[0];
        state_[3] ^= state_[1];
        state_[1] ^= state_[2];
        state_[0] ^= state_[3];
        state_[2] ^= t;
        state_[3] = rotate(state_[3], 45);
        return result;
    }

    // Uniform in [0, n); n > 0.
    std::int32_t below(std::int32_t n) {
        return static_cast<std::int32_t>(((next() >> 32) * static_cast<std::uint64_t>(n)) >> 32);
    }
    double unit() { return static_cast<double>(next() >> 11) * 0x1p-53; }
    double normal() {
        return std::sqrt(-2.0 * std::log(1.0 - unit())) * std::cos(6.283185307179586 * unit());
    }
    bool chance(double p) { return unit() < p; }
    double exponential() { return exponential_[next() >> 52]; }

   private:
    static std::uint64_t rotate(std::uint64_t x, int k) { return (x << k) | (x >> (64 - k)); }
    std::uint64_t state_[4];
    std::vector<double> exponential_;
};

}  // namespace rekindle
