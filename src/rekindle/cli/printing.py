"""Numbers, tables and JSON as the commands print them."""

import json
from typing import Any

from rekindle.report.format import cost, overhead, percent, signed_percent, size
from rekindle.report.text import table

__all__ = ["cost", "overhead", "percent", "print_json", "signed_percent", "size", "table"]


def print_json(record: dict[str, Any]) -> None:
    """One object on one line, as `--json` promises."""
    print(json.dumps(record))
