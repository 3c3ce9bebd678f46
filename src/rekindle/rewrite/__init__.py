"""Exact rewrites of a recorded graph: each pass with the condition under which it is exact."""
