// Asks each structure what an annealing run asked (record_memory.h), checks every answer against
// the recorded one, and times it.
//
//   replay TRACE    -> one line per structure and question: name, question, how many, ns for each
//
// The additions are made in every pass and timed alone; a frequent question costs what a pass takes
// longer with it, the rare ones show only in the pass with all. CPU time, the fastest of five
// passes, in turn over the structures.
#include <array>
#include <bit>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <fstream>
#include <vector>

#include "record_memory.h"
#include "tree_memory.h"

using namespace rekindle;

namespace {

using Words = std::vector<std::int64_t>;

constexpr std::array<const char*, 8> names{"resize",   "assign", "add",  "excess_change",
                                           "may_gain", "at",     "peak", "peak_slot"};

void expect(bool same, const char* name, const char* asked, std::size_t where) {
    if (same) return;
    std::fprintf(stderr, "%s: another answer to %s, word %zu of the trace\n", name, asked, where);
    std::exit(1);
}

std::span<const MemorySegment> segments(const std::int64_t* count) {
    return {reinterpret_cast<const MemorySegment*>(count + 1), static_cast<std::size_t>(*count)};
}

// The words of the question at `w`, answers and all.
std::size_t length(const std::int64_t* w) {
    switch (w[0]) {
        case Asked::resize: return 3;
        case Asked::assign: return 2 + static_cast<std::size_t>(w[1]);
        case Asked::add: return 3 + 2 * static_cast<std::size_t>(w[2]);
        case Asked::excess_change: return 6 + 2 * static_cast<std::size_t>(w[5]);
        case Asked::may_gain: return 11;
        case Asked::at: return 3;
        default: return 2;
    }
}

template <class Memory>
bool ask(Memory& memory, const std::int64_t* w) {
    const auto slot = [](std::int64_t x) { return static_cast<std::int32_t>(x); };
    switch (w[0]) {
        case Asked::resize: return memory.resize(slot(w[1])) == w[2];
        case Asked::assign: memory.assign({w + 2, static_cast<std::size_t>(w[1])}); return true;
        case Asked::add: memory.add(segments(w + 2), static_cast<int>(w[1])); return true;
        case Asked::excess_change: {
            const Excess excess = memory.excess_change(segments(w + 5), {w[1], w[2]});
            return excess.soft == w[3] && excess.hard == w[4];
        }
        case Asked::may_gain: {
            double gain = std::bit_cast<double>(w[8]);
            const bool answer =
                memory.may_gain(slot(w[1]), slot(w[2]), w[3], {w[4], w[5]},
                                std::bit_cast<double>(w[6]), std::bit_cast<double>(w[7]), gain);
            return answer == (w[10] != 0) && gain == std::bit_cast<double>(w[9]);
        }
        case Asked::at: return memory.at(slot(w[1])) == w[2];
        case Asked::peak: return memory.peak() == w[1];
        default: return memory.peak_slot() == w[1];
    }
}

constexpr std::int64_t all = -1;

double now_ns() {
    timespec now;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    return 1e9 * static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec);
}

// Nanoseconds of a pass with the additions and the questions of one kind, or all; `assign` and
// `resize` are made and not counted.
template <class Memory>
double pass(const Words& trace, const char* name, std::int64_t kind) {
    Memory memory;
    double apart = 0;
    const double begun = now_ns();
    for (std::size_t k = 0; k < trace.size(); k += length(trace.data() + k)) {
        const std::int64_t* w = trace.data() + k;
        const bool prepares = w[0] == Asked::resize || w[0] == Asked::assign;
        if (!prepares && w[0] != Asked::add && w[0] != kind && kind != all) continue;
        const double before = prepares ? now_ns() : 0;
        expect(ask(memory, w), name, names[static_cast<std::size_t>(w[0])], k);
        if (prepares) apart += now_ns() - before;
    }
    return now_ns() - begun - apart;
}

constexpr std::array<std::int64_t, 4> kinds{Asked::add, Asked::excess_change, Asked::at, all};

struct Times {
    const char* name;
    double (*pass)(const Words&, const char*, std::int64_t);
    std::array<double, kinds.size()> best;
};

Words read(const char* path) {
    std::ifstream in(path, std::ios::binary | std::ios::ate);
    if (!in) std::exit(2);
    Words words(static_cast<std::size_t>(in.tellg()) / 8);
    in.seekg(0);
    in.read(reinterpret_cast<char*>(words.data()), static_cast<std::streamsize>(8 * words.size()));
    return words;
}

}  // namespace

int main(int, char** arguments) {
    const Words trace = read(arguments[1]);
    std::array<std::int64_t, names.size()> count{};
    for (std::size_t k = 0; k < trace.size(); k += length(trace.data() + k))
        ++count[static_cast<std::size_t>(trace[k])];
    std::array<Times, 3> structures{{{"blocks", pass<BlockMemory>, {}},
                                     {"tree", pass<TreeMemory<0>>, {}},
                                     {"tree of blocks", pass<TreeMemory<5>>, {}}}};
    for (Times& s : structures) s.best.fill(1e300);
    for (int round = 0; round < 5; ++round)
        for (std::size_t k = 0; k < kinds.size(); ++k)
            for (Times& s : structures)
                s.best[k] = std::min(s.best[k], s.pass(trace, s.name, kinds[k]));
    std::int64_t questions = 0;
    for (std::size_t kind = Asked::add; kind < names.size(); ++kind) questions += count[kind];
    for (const Times& s : structures)
        for (std::size_t k = 0; k < kinds.size(); ++k) {
            const bool alone = kinds[k] == all || kinds[k] == Asked::add;
            const auto kind = static_cast<std::size_t>(kinds[k]);
            const auto times = kinds[k] == all ? questions : count[kind];
            std::printf("%s,%s,%lld,%.1f\n", s.name, kinds[k] == all ? "all" : names[kind],
                        static_cast<long long>(times),
                        (s.best[k] - (alone ? 0 : s.best[0])) / static_cast<double>(times));
        }
}
