"""The command line. One module per group of commands; `entry` puts them together.

A group is a module with `add_commands(commands)`, which adds its parsers and sets `run` on each: a
function of the parsed arguments that prints the answer and returns an `ExitCode`. torch is
imported inside `run`, and only by the commands that need a model.
"""

from rekindle.cli.entry import main

__all__ = ["main"]
