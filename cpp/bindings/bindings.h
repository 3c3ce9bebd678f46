// What the bindings of all rooms share. Files of bindings/ alone include nanobind: the core behind
// them knows no Python.
//
// A function that works longer than some milliseconds gives up the GIL while it does (its arguments
// are C++ copies by then), and has a Control, so that Ctrl-C and the time limit end it.
#pragma once

#include <nanobind/nanobind.h>

#include "core/control.h"

namespace rekindle {

namespace nb = nanobind;
using namespace nb::literals;

void bind_core(nb::module_& m);
void bind_greedy(nb::module_& m);
void bind_search(nb::module_& m);
void bind_bound(nb::module_& m);
void bind_anneal(nb::module_& m);
void bind_chain(nb::module_& m);
void bind_watch(nb::module_& m);
void bind_place(nb::module_& m);

// Sets the time limit, and has the search look for signals.
void limit(Control& control, double time_limit_s);

// What ended a search before it was through: "interrupt", "time limit" or "".
const char* ended_by(const Control& control);

// For a search whose half-done work is worth nothing. With the GIL.
[[noreturn]] void raise_interrupt();

}  // namespace rekindle
