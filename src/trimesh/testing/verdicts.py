"""Verdicts of one test on several back ends, side by side: a line for each test on which they differ. PURE."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final, cast

import msgspec

VERDICT: Final = "mesh_verdict"
"""Property of a report: file and name of the test without its back end, back end, number of seeds, failing seed."""

ORDER: Final = ("sim", "proc", "net")
"""Back ends, as a line has them."""

REASON_CHARS: Final = 100
"""Text of one failure in a line."""


class BackendVerdict(msgspec.Struct, frozen=True):
    """Outcome of a test on one back end.

    Attributes:
        backend: "sim", "proc" or "net".
        outcome: "passed", "failed" or "skipped".
        seeds: Number of seeds that ran; 0 for a run that no seed decides.
        seed: The seed that failed, if a seed decides.
        reason: Text of the failure, or why it was skipped.
    """

    backend: str
    outcome: str
    seeds: int = 0
    seed: int | None = None
    reason: str = ""

    def __str__(self) -> str:
        if self.outcome == "passed":
            return f"{self.backend} passes ({self.seeds} seeds)" if self.seeds else f"{self.backend} passes (one run)"
        if self.outcome == "skipped":
            return f"{self.backend} not run ({self.reason})"
        of_seed = "" if self.seed is None else f"seed {self.seed:#x}: "
        return f"{self.backend} fails ({of_seed}{self.reason})"


def differing(reports: Iterable[Any]) -> Iterator[str]:
    """Yield a line for each test that fails on some back ends only.

    Args:
        reports: Reports of pytest; those without the property `VERDICT` are ignored.
    """
    found: dict[tuple[str, str], dict[str, BackendVerdict]] = {}
    for report in reports:
        told = next((value for name, value in getattr(report, "user_properties", ()) if name == VERDICT), None)
        if told is not None:
            file, test, backend, seeds, seed = told
            outcome = "failed" if report.outcome == "rerun" else report.outcome
            verdict = BackendVerdict(backend, outcome, seeds, seed, _reason(report.longrepr))
            found.setdefault((file, test), {})[backend] = verdict
    for (_, test), verdicts in found.items():
        outcomes = {one.outcome for one in verdicts.values()}
        if "failed" in outcomes and len(outcomes) > 1:
            yield f"{test}: {', '.join(str(verdicts[backend]) for backend in ORDER if backend in verdicts)}"


def _reason(longrepr: Any) -> str:
    if isinstance(longrepr, tuple):  # file, line and text of a skip
        text = str(cast("Any", longrepr)[-1]).removeprefix("Skipped: ")
    else:
        text = getattr(getattr(longrepr, "reprcrash", None), "message", str(longrepr or ""))
    first = text.strip().split("\n", 1)[0].removeprefix("AssertionError: ")
    return first if len(first) <= REASON_CHARS else first[: REASON_CHARS - 3] + "..."
