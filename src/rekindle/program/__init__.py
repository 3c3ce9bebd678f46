"""JointGraph -> `Program` -> `Problem`: storages, ops and their effects, and what each op is
charged for."""

from rekindle.program.charges import charged_nodes, value_bytes
from rekindle.program.program import Program, analyse

__all__ = ["Program", "analyse", "charged_nodes", "value_bytes"]
