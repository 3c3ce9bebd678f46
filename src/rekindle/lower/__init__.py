"""From a program and a schedule to code: fx graphs in schedule order, and the functions that are
generated from them. Nothing runs here; `runtime` does that."""
