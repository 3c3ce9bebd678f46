// Problems come in as flat lists and are checked here, once: behind this file every id is in range
// and every row complete, so that the core need not look. And the simulator.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "core/lanes.h"
#include "core/problem.h"
#include "core/simulate.h"

namespace rekindle {

namespace {

// Rows as Python gives them: all ids one after the other, and where each row ends.
using FlatRows = std::tuple<std::vector<Id>, std::vector<std::size_t>>;

void check_ids(std::span<const Id> ids, std::size_t count) {
    for (Id v : ids)
        if (v < 0 || static_cast<std::size_t>(v) >= count)
            throw nb::index_error("a value id is out of range");
}

std::vector<Id> without(std::span<const Id> ids, const std::vector<std::uint8_t>& resident) {
    check_ids(ids, resident.size());
    std::vector<Id> kept;
    for (Id v : ids)
        if (!resident[static_cast<std::size_t>(v)]) kept.push_back(v);
    return kept;
}

Rows rows_of(const FlatRows& flat, std::size_t num_ops, const std::vector<std::uint8_t>& resident) {
    const auto& [ids, ends] = flat;
    check_ids(ids, resident.size());
    if (ends.size() != num_ops) throw nb::value_error("there must be one row for each op");
    Rows rows;
    rows.ids.reserve(ids.size());
    rows.start.reserve(ends.size() + 1);
    std::size_t k = 0;
    for (std::size_t end : ends) {
        if (end > ids.size()) throw nb::value_error("a row ends beyond the ids");
        for (; k < end; ++k)
            if (!resident[static_cast<std::size_t>(ids[k])]) rows.ids.push_back(ids[k]);
        rows.start.push_back(rows.ids.size());
    }
    return rows;
}

// Rows of value, op, value, op, ...: checked like all other ids.
Rows pins_of(const FlatRows& flat, const Problem& p) {
    const auto& [ids, ends] = flat;
    if (ends.size() != p.cost.size()) throw nb::value_error("there must be one row for each op");
    Rows rows;
    std::size_t k = 0;
    for (std::size_t end : ends) {
        if (end > ids.size() || end < k || (end - k) % 2 != 0)
            throw nb::value_error("a row of pins is not made of pairs");
        rows.push({ids.data() + k, end - k});
        k = end;
    }
    for (Id i = 0; i < p.num_ops(); ++i) {
        const auto pins = rows[i];
        for (std::size_t at = 0; at < pins.size(); at += 2) {
            const auto inputs = p.inputs[i];
            if (std::find(inputs.begin(), inputs.end(), pins[at]) == inputs.end())
                throw nb::value_error("an op pins what it does not read");
            if (pins[at + 1] < 0 || pins[at + 1] >= p.num_ops())
                throw nb::index_error("an op id is out of range");
        }
    }
    return rows;
}

// What `simulate` takes of each transfer: its kind, the value, and the op it stands before.
using FlatTransfers = std::vector<std::tuple<Transfer::Kind, Id, std::size_t>>;

std::vector<Transfer> transfers_of(const FlatTransfers& flat) {
    std::vector<Transfer> transfers;
    transfers.reserve(flat.size());
    for (const auto& [kind, value, before] : flat) transfers.push_back({kind, value, before});
    return transfers;
}

void bind_link(nb::module_& m) {
    nb::class_<HostLink>(m, "HostLink")
        .def(
            "__init__",
            [](HostLink* self, std::int64_t to_host, std::int64_t from_host, std::int64_t latency,
               std::int64_t least, std::optional<std::int64_t> host_budget, bool serial) {
                if (to_host <= 0 || from_host <= 0 || latency < 0 || least < 0 ||
                    host_budget.value_or(0) < 0)
                    throw nb::value_error("a rate is above 0, and no other number is below 0");
                new (self) HostLink{to_host, from_host, latency, least, host_budget, serial};
            },
            "to_host"_a, "from_host"_a, "latency"_a, "least"_a, "host_budget"_a = nb::none(),
            "serial"_a = false);

    nb::enum_<Transfer::Kind>(m, "TransferKind")
        .value("send", Transfer::Kind::send)
        .value("drop", Transfer::Kind::drop)
        .value("fetch", Transfer::Kind::fetch)
        .value("release", Transfer::Kind::release);
}

void bind_problem(nb::module_& m) {
    nb::class_<Problem>(m, "Problem")
        .def(
            "__init__",
            [](Problem* self, std::vector<std::int64_t> sizes, const std::vector<Id>& resident,
               std::vector<std::int64_t> costs, std::vector<std::int64_t> workspaces,
               const std::vector<bool>& once, const FlatRows& inputs, const FlatRows& outputs,
               const FlatRows& inplace, const std::vector<Id>& targets, const std::vector<Id>& held,
               Id loss, std::optional<HostLink> link, const std::optional<FlatRows>& pins) {
                // Built apart and moved in: nothing half-made stays behind an exception.
                Problem p;
                const std::size_t num_ops = costs.size();
                if (workspaces.size() != num_ops || once.size() != num_ops)
                    throw nb::value_error("costs, workspaces and once must be of one length");
                p.resident.assign(sizes.size(), 0);
                check_ids(resident, sizes.size());
                for (Id v : resident) p.resident[static_cast<std::size_t>(v)] = 1;
                p.size = std::move(sizes);
                p.cost = std::move(costs);
                p.workspace = std::move(workspaces);
                p.once.assign(once.begin(), once.end());
                p.inputs = rows_of(inputs, num_ops, p.resident);
                p.outputs = rows_of(outputs, num_ops, p.resident);
                p.inplace = rows_of(inplace, num_ops, p.resident);
                // `rows_of` left resident values out, which would shift the pairs.
                if (p.inplace.ids.size() != std::get<0>(inplace).size())
                    throw nb::value_error("a resident value stands in an inplace pair");
                for (Id i = 0; i < p.num_ops(); ++i)
                    if (p.inplace[i].size() % 2 != 0)
                        throw nb::value_error("an inplace row is not made of pairs");
                p.targets = without(targets, p.resident);
                p.held = without(held, p.resident);
                if (pins) p.pins = pins_of(*pins, p);
                p.loss = loss;
                p.link = link;
                p.index();
                new (self) Problem(std::move(p));
            },
            "sizes"_a, "resident"_a, "costs"_a, "workspaces"_a, "once"_a, "inputs"_a, "outputs"_a,
            "inplace"_a, "targets"_a, "held"_a, "loss"_a, "link"_a = nb::none(),
            "pins"_a = nb::none(),
            "Rows are (all ids, where each row ends); inplace rows are input, output, input, "
            "output, ...; rows of pins are value, op, value, op, ... Resident values are left out "
            "of "
            "inputs, targets and held.");
}

void bind_simulation(nb::module_& m) {
    nb::enum_<Fault>(m, "Fault")
        .value("none", Fault::none)
        .value("no_such_op", Fault::no_such_op)
        .value("not_produced", Fault::not_produced)
        .value("once_broken", Fault::once_broken)
        .value("output_missing", Fault::output_missing)
        .value("misplaced", Fault::misplaced)
        .value("no_link", Fault::no_link)
        .value("not_movable", Fault::not_movable)
        .value("not_on_device", Fault::not_on_device)
        .value("on_host", Fault::on_host)
        .value("not_sent", Fault::not_sent)
        .value("not_on_host", Fault::not_on_host)
        .value("not_dropped", Fault::not_dropped)
        .value("not_read", Fault::not_read)
        .value("host_budget", Fault::host_budget);

    nb::class_<Trace>(m, "Trace")
        .def_ro("fault", &Trace::fault)
        .def_ro("step", &Trace::step)
        .def_ro("op", &Trace::op)
        .def_ro("value", &Trace::value)
        .def_ro("times", &Trace::times)
        .def_ro("memory", &Trace::memory)
        .def_ro("peak", &Trace::peak)
        .def_ro("peak_step", &Trace::peak_step)
        .def_ro("runs", &Trace::runs)
        .def_ro("host_memory", &Trace::host_memory)
        .def_ro("host_peak", &Trace::host_peak)
        .def_prop_ro("copies", [](const Trace& trace) {
            std::vector<std::tuple<Id, std::size_t, std::size_t>> rows;
            rows.reserve(trace.copies.size());
            for (const Copy& c : trace.copies) rows.emplace_back(c.value, c.first, c.last);
            return rows;
        });

    m.def(
        "simulate",
        [](const Problem& problem, const std::vector<Id>& schedule) {
            nb::gil_scoped_release release;
            return simulate(problem, schedule);
        },
        "problem"_a, "schedule"_a);
    nb::class_<Lanes>(m, "Lanes")
        .def_ro("start", &Lanes::start)
        .def_ro("finish", &Lanes::finish)
        .def_ro("compute", &Lanes::compute)
        .def_ro("to_host", &Lanes::to_host)
        .def_ro("from_host", &Lanes::from_host)
        .def_ro("cost", &Lanes::cost)
        .def_ro("too_late", &Lanes::too_late);
    m.def(
        "simulate_transfers",
        [](const Problem& problem, const std::vector<Id>& schedule, const FlatTransfers& flat) {
            nb::gil_scoped_release release;
            const std::vector<Transfer> transfers = transfers_of(flat);
            Trace trace = simulate(problem, schedule, transfers);
            // The account of time trusts that every step finds what it wants.
            std::optional<Lanes> lanes;
            if (trace.valid() && problem.link) lanes = time_lanes(problem, schedule, transfers);
            return std::make_tuple(std::move(trace), std::move(lanes));
        },
        "problem"_a, "schedule"_a, "transfers"_a,
        "Transfers are (kind, value, the position of the op they stand before), in order.");

    m.def(
        "drop_dead_runs",
        [](const Problem& problem, const std::vector<Id>& schedule) {
            nb::gil_scoped_release release;
            return drop_dead_runs(problem, schedule);
        },
        "problem"_a, "schedule"_a);
}

}  // namespace

void bind_core(nb::module_& m) {
    bind_link(m);
    bind_problem(m);
    bind_simulation(m);
}

}  // namespace rekindle
