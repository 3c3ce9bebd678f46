"""Rotor: dynamic programs over chains."""
