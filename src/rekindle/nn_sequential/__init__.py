"""`rekindle.sequential`: chains of modules, planned without capturing a graph."""
