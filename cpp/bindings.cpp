// The module rekindle._native: what each room of the core offers is registered in
// bindings/ROOM.cpp.
#include "bindings/bindings.h"

namespace rekindle {

namespace {

// Lets Ctrl-C end a native search. The signal is taken here (the exception is cleared), so that a
// search can return its best so far; the binding then tells its caller of `was_interrupted`.
bool signalled() {
    nb::gil_scoped_acquire gil;
    if (PyErr_CheckSignals() == 0) return false;
    PyErr_Clear();
    return true;
}

}  // namespace

void limit(Control& control, double time_limit_s) {
    control.time_limit_s = time_limit_s;
    control.interrupted = signalled;
}

const char* ended_by(const Control& control) {
    return control.was_interrupted ? "interrupt" : control.stop ? "time limit" : "";
}

void raise_interrupt() {
    PyErr_SetNone(PyExc_KeyboardInterrupt);
    throw nb::python_error();
}

}  // namespace rekindle

NB_MODULE(_native, m) {
    // A problem that lives until the interpreter ends (a global) is no leak worth a warning.
    nanobind::set_leak_warnings(false);
    m.doc() = "Rekindle's native core: simulation and search over problems given as flat lists.";

    rekindle::bind_core(m);
    rekindle::bind_greedy(m);
    rekindle::bind_search(m);
    rekindle::bind_bound(m);
    rekindle::bind_anneal(m);
    rekindle::bind_chain(m);
    rekindle::bind_watch(m);
    rekindle::bind_place(m);
}
