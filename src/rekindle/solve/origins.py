"""Where each solver comes from: what is of a paper, what is ours, and what differs from the paper.

`rekindle solvers` prints it, docs/papers.md has it as a table, and a test looks the named tests up.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Origin:
    """Of one solver."""

    paper: str  # "" where there is none
    ours: str = ""  # what the paper does not have
    corrected: str = ""  # where the paper, as printed, is not followed
    test: str = ""  # the file that shows it, below tests/


UNKNOWN = Origin("")  # of a solver that was added and is not listed here
_ROTOR = "Beaumont et al., TOMS 2024"
ORIGINS: dict[str, Origin] = {
    "auto": Origin("", "all of it", "", "unit/solve/test_auto.py"),
    "hiremate": Origin(
        "Gusak et al., ICML 2025",
        "annealing as an option maker and at the end; budgets somewhat above the real one",
        "disaggregated drops instead of products of hazards; no forward repeats before the loss "
        "at one level",
        "property/test_hiremate_property.py",
    ),
    "rockmate": Origin(
        "Zhao et al., ICML 2023",
        "points of the grid that follow from others are left out; needless runs are dropped",
        "Opt(s + 1, ...) in Eq. 1",
        "unit/solve/test_hiremate.py",
    ),
    "fastsa": Origin(
        "Imanishi et al., NeurIPS 2023",
        "the objective `area`, directed moves, blocks instead of a segment tree, rounds",
        "a value counts at the step that makes it; `FastSA.as_published()` has the settings of D.4",
        "unit/solve/test_fastsa.py",
    ),
    "twremat": Origin(
        "Kumar et al., NeurIPS 2019",
        "several limits; the chain of missing values in the price of an eviction",
        "",
        "property/test_twremat_property.py",
    ),
    "rotor": Origin(
        f"{_ROTOR}, Alg. 3 and 4",
        "exact simulation decides; then runs are dropped that are not needed",
        "",
        "property/test_chain_brute_force.py",
    ),
    "rotor-floating": Origin(
        f"{_ROTOR}, Alg. 1 and 2",
        "O(n^4 M) instead of O(n^6 M)",
        "the theorem as printed misses the move of the last kept input alone",
        "property/test_chain_brute_force.py",
    ),
    "revolve": Origin(f"{_ROTOR}, Sec. 5.4", "", "", "unit/solve/test_rotor.py"),
    "sequential": Origin("Chen et al., 2016", "", "", "unit/solve/test_rotor.py"),
    "reorder": Origin(
        "Imanishi et al., NeurIPS 2023, B.2",
        "a search over sets of ops, which may prove the smallest peak of any order",
        "",
        "unit/solve/test_fastsa.py",
    ),
    "checkmate": Origin(
        "Jain et al., MLSys 2020; rk-Checkmate, Zhao et al., ICML 2023, App. B",
        "the cap on the extra cost; a first schedule and bound by heuristics",
        "variables that say while a value is kept, instead of when it is freed",
        "property/test_checkmate_brute_force.py",
    ),
    "moccasin": Origin(
        "Bartan et al., ICML 2023",
        "phase 1 by heuristics, phase 2 on neighbourhoods; one literal for each copy that is read",
        "half-open intervals; reservoirs only as an option",
        "property/test_moccasin_brute_force.py",
    ),
    "checkmate-lp": Origin(
        "Jain et al., MLSys 2020, Sec. 5; Imanishi et al., D.2",
        "under a cap on the extra cost, so no bound comes from it",
        "",
        "unit/solve/test_staged_solvers.py",
    ),
    "floor": Origin("", "all of it", "", "unit/solve/test_baselines.py"),
    "sqrt": Origin(
        "Chen et al., 2016", "any graph, by its order", "", "unit/solve/test_baselines.py"
    ),
    "keep-all": Origin("", "", "", "unit/solve/test_baselines.py"),
}
