"""CUDA source of the kernels that the rewrites put in."""
