// BlockMemory that writes down what it is asked and what it answers, for `replay.cpp`: the file
// that the environment variable REKINDLE_TRACE names, in words of 64 bits.
#pragma once

#include <bit>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <span>
#include <vector>

#include "anneal/memory.h"

namespace rekindle {

enum Asked : std::int64_t { resize, assign, add, excess_change, may_gain, at, peak, peak_slot };

class RecordMemory {
   public:
    ~RecordMemory() {
        flush();
        if (file_) std::fclose(file_);
    }

    std::int32_t resize(std::int32_t wanted) {
        const std::int32_t answer = memory_.resize(wanted);
        write({Asked::resize, wanted, answer});
        return answer;
    }
    void assign(std::span<const std::int64_t> memory) {
        write({Asked::assign, static_cast<std::int64_t>(memory.size())});
        words_.insert(words_.end(), memory.begin(), memory.end());
        memory_.assign(memory);
    }
    std::int64_t at(std::int32_t t) const {
        const std::int64_t answer = memory_.at(t);
        write({Asked::at, t, answer});
        return answer;
    }
    std::int64_t peak() const {
        const std::int64_t answer = memory_.peak();
        write({Asked::peak, answer});
        return answer;
    }
    std::int32_t peak_slot() const {
        const std::int32_t answer = memory_.peak_slot();
        write({Asked::peak_slot, answer});
        return answer;
    }
    void add(std::span<const MemorySegment> segments, int sign) {
        write({Asked::add, sign});
        write(segments);
        memory_.add(segments, sign);
    }
    Excess excess_change(std::span<const MemorySegment> segments, Lines lines) const {
        const Excess answer = memory_.excess_change(segments, lines);
        write({Asked::excess_change, lines.soft, lines.hard, answer.soft, answer.hard});
        write(segments);
        return answer;
    }
    bool may_gain(std::int32_t first, std::int32_t stop, std::int64_t size, Lines lines,
                  double soft_weight, double wanted, double& gain) const {
        const double before = gain;
        const bool answer = memory_.may_gain(first, stop, size, lines, soft_weight, wanted, gain);
        write({Asked::may_gain, first, stop, size, lines.soft, lines.hard,
               std::bit_cast<std::int64_t>(soft_weight), std::bit_cast<std::int64_t>(wanted),
               std::bit_cast<std::int64_t>(before), std::bit_cast<std::int64_t>(gain), answer});
        return answer;
    }
    void smooth(double) { std::abort(); }  // not recorded: its answers are rounded
    double smooth_peak() const { std::abort(); }

   private:
    static_assert(sizeof(MemorySegment) == 2 * sizeof(std::int64_t));

    void write(std::initializer_list<std::int64_t> words) const {
        words_.insert(words_.end(), words);
        if (words_.size() > (1 << 20)) flush();
    }
    void write(std::span<const MemorySegment> segments) const {
        words_.push_back(static_cast<std::int64_t>(segments.size()));
        const auto* first = reinterpret_cast<const std::int64_t*>(segments.data());
        words_.insert(words_.end(), first, first + 2 * segments.size());
    }
    void flush() const {
        if (!file_) file_ = std::fopen(std::getenv("REKINDLE_TRACE"), "wb");
        if (!file_ || std::fwrite(words_.data(), 8, words_.size(), file_) != words_.size())
            std::abort();
        words_.clear();
    }

    BlockMemory memory_;
    mutable std::vector<std::int64_t> words_;
    mutable std::FILE* file_ = nullptr;
};

}  // namespace rekindle
