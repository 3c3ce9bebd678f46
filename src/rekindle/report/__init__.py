"""Reports on a schedule: its account, as text, as an HTML page and as traces.

`account` turns a problem, a schedule and what else is known (`Facts`) into one `Account`; the
terminal, the page and the JSON all print from it, so that a number has one origin. No torch.
"""

from rekindle.report.account import Account, CurvePoint, Facts, Step, account
from rekindle.report.text import explain, explain_module, verdict

__all__ = [
    "Account",
    "CurvePoint",
    "Facts",
    "Step",
    "account",
    "explain",
    "explain_module",
    "verdict",
]
