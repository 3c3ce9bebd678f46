// The problem as flat arrays: what the native algorithms read. Ids are positions; lists are CSR.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace rekindle {

// Of an op or a value. Signed, so that -1 can say "none"; `idx` makes it a position.
using Id = std::int32_t;

constexpr std::size_t idx(Id id) { return static_cast<std::size_t>(id); }

// Rows of ids: row i is ids[start[i]] .. ids[start[i + 1] - 1].
struct Rows {
    std::vector<std::size_t> start{0};
    std::vector<Id> ids;

    std::span<const Id> operator[](Id i) const {
        const auto u = static_cast<std::size_t>(i);
        return {ids.data() + start[u], start[u + 1] - start[u]};
    }
    std::size_t size() const { return start.size() - 1; }
    void push(std::span<const Id> row) {
        ids.insert(ids.end(), row.begin(), row.end());
        start.push_back(ids.size());
    }
};

// How values may be moved to host memory and back: rates in bytes per second, both above 0.
struct HostLink {
    std::int64_t to_host = 1;
    std::int64_t from_host = 1;
    std::int64_t latency = 0;  // ns that a transfer takes besides its bytes
    std::int64_t least = 0;    // smaller values are never moved
    std::optional<std::int64_t> host_budget;
    bool serial = false;  // cost is a sum of times, not the end of the last lane
};

// Sizes and costs are below 2^62, and so are their sums (check_problem makes sure), so a memory of
// two copies of everything and a workspace still fits 64 unsigned bits.
struct Problem {
    std::vector<std::int64_t> size;       // per value
    std::vector<std::uint8_t> resident;   // per value
    std::vector<Id> producer;             // per value, -1 where resident
    std::vector<std::int64_t> cost;       // per op
    std::vector<std::int64_t> workspace;  // per op
    std::vector<std::uint8_t> once;       // per op: must stand exactly once
    Rows inputs;                          // per op, resident values left out
    Rows outputs;                         // per op
    Rows inplace;                         // per op: input, output, input, output, ...
    Rows readers;                         // per value: the ops that read it
    std::vector<Id> targets;              // non-resident values that must be there at the end
    std::vector<Id> held;                 // non-resident values held from the loss op on
    Rows pins;  // per op: value, op until which the copy it reads lives, value, op, ...
    Id loss = -1;
    std::optional<HostLink> link;  // none: every transfer is a fault

    Id num_ops() const { return static_cast<Id>(cost.size()); }
    Id num_values() const { return static_cast<Id>(size.size()); }

    std::int64_t size_of(Id v) const { return size[static_cast<std::size_t>(v)]; }
    std::int64_t cost_of(Id i) const { return cost[static_cast<std::size_t>(i)]; }
    bool is_once(Id i) const { return once[static_cast<std::size_t>(i)] != 0; }
    Id producer_of(Id v) const { return producer[static_cast<std::size_t>(v)]; }

    // Fills `producer` and `readers` from inputs and outputs.
    void index();
};

}  // namespace rekindle
