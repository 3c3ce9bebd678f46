"""From a schedule to code: fx graphs in schedule order, and the module that runs them."""
