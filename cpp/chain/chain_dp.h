// Dynamic programs over a chain of blocks: when to keep a block's input, when to save what its
// backward needs, when to run it again.
//
//   Rotor   Beaumont et al., "Optimal re-materialization strategies for heterogeneous chains", ACM
//           TOMS 2024: Sec. 4.4 (persistent, O(n^3 M)), Sec. 4.3 (floating), Sec. 5.4 (revolve).
//   rk-Rotor Zhao et al., "Rockmate", ICML 2023, App. C: many options per block.
//
// Block i reads one activation of `input[i]` bytes and makes the input of block i + 1. Its forward
// runs either bare (nothing of it is kept but its output) or by one of its options, which saves
// what that option's backward reads. A part (s, t) of the chain is: the input of s is there and
// stays outside the memory m, the gradients that come into t are there, and the backward of
// t, t - 1, ..., s must run.
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <vector>

#include "core/control.h"

namespace rekindle {

// All peaks leave out the block's input and the bytes that stand anyway (`Chain::standing`).
struct BlockOption {
    std::int64_t saved = 0;          // kept from its forward to its backward, its output included
    std::int64_t forward_peak = 0;   // while its forward runs
    std::int64_t backward_peak = 0;  // while its backward runs, what was saved included
    std::int64_t cost = 0;           // forward and backward together
};

struct Chain {
    std::vector<std::int64_t> input;      // bytes of the activation that block i reads
    std::vector<std::int64_t> standing;   // gradients there from the end of the backward of i + 1
                                          // to the start of the backward of i
    std::vector<std::int64_t> bare_cost;  // the forward of block i, nothing saved
    std::vector<std::int64_t> bare_peak;  // its peak where the input stays; output included
    std::vector<std::int64_t> pass_peak;  // its peak where the input may go, the input included
    std::vector<std::vector<BlockOption>> options;

    std::size_t size() const { return input.size(); }
};

enum class ChainRule : std::uint8_t {
    persistent,  // Alg. 3: an activation that is kept stays until its backward
    revolve,     // persistent, and an option runs only right before its backward
    floating,    // Alg. 1, with the move of the floating activation alone added
};

// The operations of Table 1: F_none, F_ck, F_all (by an option) and B (of that option).
enum class ChainRun : std::uint8_t { drop, keep, save, back };

struct ChainStep {
    ChainRun run;
    std::int32_t block;
    std::int32_t option;  // -1 for drop and keep
};

constexpr double unreachable = std::numeric_limits<double>::infinity();

// The solved table. Memory is counted in slots of `unit` bytes: sizes are rounded up, so a sequence
// that fits its slots fits slots * unit bytes beside the chain's own input.
class ChainTable {
   public:
    virtual ~ChainTable() = default;
    // The least cost of the whole chain with that many slots, or `unreachable`.
    virtual double cost(std::size_t slots) const = 0;
    // The sequence of that cost; empty where there is none.
    virtual std::vector<ChainStep> build(std::size_t slots) const = 0;
    bool finished = false;  // false: the time limit or an interrupt ended the work, no answers
};

std::unique_ptr<ChainTable> solve_chain(const Chain& chain, std::int64_t unit, std::size_t slots,
                                        ChainRule rule, Control& control);

// The bytes that solve_chain will take for its table.
std::size_t chain_table_bytes(std::size_t num_blocks, std::size_t slots, ChainRule rule);

}  // namespace rekindle
