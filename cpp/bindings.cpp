// The only file that knows Python: rekindle._native.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <span>
#include <tuple>
#include <vector>

#include "control.h"
#include "evict.h"
#include "problem.h"
#include "simulate.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace rekindle;

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

// Lets Ctrl-C end a native search. The signal is taken here (the exception is cleared), so that a
// search can return its best so far; the binding then tells its caller of `was_interrupted`.
bool signalled() {
    nb::gil_scoped_acquire gil;
    if (PyErr_CheckSignals() == 0) return false;
    PyErr_Clear();
    return true;
}

[[noreturn]] void raise_interrupt() {
    PyErr_SetNone(PyExc_KeyboardInterrupt);
    throw nb::python_error();
}

void limit(Control& control, double time_limit_s) {
    control.time_limit_s = time_limit_s;
    control.interrupted = signalled;
}

}  // namespace

NB_MODULE(_native, m) {
    // A problem that lives until the interpreter ends (a global) is no leak worth a warning.
    nb::set_leak_warnings(false);
    m.doc() = "Rekindle's native core: simulation and search over problems given as flat lists.";

    nb::class_<Problem>(m, "Problem")
        .def(
            "__init__",
            [](Problem* self, std::vector<std::int64_t> sizes, const std::vector<Id>& resident,
               std::vector<std::int64_t> costs, std::vector<std::int64_t> workspaces,
               const std::vector<bool>& once, const FlatRows& inputs, const FlatRows& outputs,
               const FlatRows& inplace, const std::vector<Id>& targets,
               const std::vector<Id>& held, Id loss) {
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
                if (p.inplace.ids.size() != std::get<0>(inplace).size())
                    throw nb::value_error("a resident value stands in an inplace pair");
                for (Id i = 0; i < p.num_ops(); ++i)
                    if (p.inplace[i].size() % 2 != 0)
                        throw nb::value_error("an inplace row is not made of pairs");
                p.targets = without(targets, p.resident);
                p.held = without(held, p.resident);
                p.loss = loss;
                p.index();
                new (self) Problem(std::move(p));
            },
            "sizes"_a, "resident"_a, "costs"_a, "workspaces"_a, "once"_a, "inputs"_a, "outputs"_a,
            "inplace"_a, "targets"_a, "held"_a, "loss"_a,
            "Rows are (all ids, where each row ends); inplace rows are input, output, input, "
            "output, ... Resident values are left out of inputs, targets and held.");

    nb::enum_<Fault>(m, "Fault")
        .value("none", Fault::none)
        .value("no_such_op", Fault::no_such_op)
        .value("not_produced", Fault::not_produced)
        .value("once_broken", Fault::once_broken)
        .value("output_missing", Fault::output_missing);

    nb::class_<Trace>(m, "Trace")
        .def_ro("fault", &Trace::fault)
        .def_ro("step", &Trace::step)
        .def_ro("op", &Trace::op)
        .def_ro("value", &Trace::value)
        .def_ro("times", &Trace::times)
        .def_ro("memory", &Trace::memory)
        .def_ro("peak", &Trace::peak)
        .def_ro("peak_step", &Trace::peak_step)
        .def_ro("runs", &Trace::runs);

    m.def(
        "simulate",
        [](const Problem& problem, const std::vector<Id>& schedule) {
            nb::gil_scoped_release release;
            return simulate(problem, schedule);
        },
        "problem"_a, "schedule"_a);

    m.def(
        "drop_dead_runs",
        [](const Problem& problem, const std::vector<Id>& schedule) {
            nb::gil_scoped_release release;
            return drop_dead_runs(problem, schedule);
        },
        "problem"_a, "schedule"_a);

    m.def(
        "evict",
        [](const Problem& problem, const std::vector<Id>& order, std::int64_t limit_bytes,
           std::size_t max_steps, double time_limit_s) {
            Control control;
            limit(control, time_limit_s);
            Eviction result;
            {
                nb::gil_scoped_release release;
                result = evict(problem, order, limit_bytes, max_steps, control);
            }
            // Half a walk is worth nothing: the interrupt goes on.
            if (control.was_interrupted) raise_interrupt();
            return std::tuple(result.fits, std::move(result.schedule));
        },
        "problem"_a, "order"_a, "limit"_a, "max_steps"_a, "time_limit_s"_a,
        "Greedy rematerialization under a memory limit; (fits, schedule). Raises KeyboardInterrupt.");
}
