"""The public test kit: whole meshes in one process under a virtual clock, faults that a test plans, and what must hold.

`@trimesh.testing.simulate(seeds=200, per_host={"gpus": 4})` runs an async test under many seeds; the fixtures `mesh`,
`faults`, `fault_log` and `chaos` come from the pytest plugin `trimesh.testing.plugin`. docs/testing.md shows how.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from trimesh.testing.chaos import Chaos, ChaosPlan, LivenessError
    from trimesh.testing.decorator import simulate
    from trimesh.testing.determinism import NotDeterministicWarning, is_bit_exact
    from trimesh.testing.dropping import CleanupRunsWarning
    from trimesh.testing.faults import Faults, UnsupportedFault
    from trimesh.testing.history import History, Recorded
    from trimesh.testing.item_run import NeverFired, NeverReached
    from trimesh.testing.linearizability import NotLinearizable, UndecidedError, check_linearizable
    from trimesh.testing.model import Model
    from trimesh.testing.operation import Operation
    from trimesh.testing.oracles import OracleError
    from trimesh.testing.plan import UnfiredFault
    from trimesh.testing.seeded_run import HangError
    from trimesh.testing.trace import Entry, Trace
    from trimesh.testing.vocabulary import Fired

_HOMES: Final = {
    "Chaos": "chaos",
    "ChaosPlan": "chaos",
    "CleanupRunsWarning": "dropping",
    "HangError": "seeded_run",
    "History": "history",
    "LivenessError": "chaos",
    "Model": "model",
    "NeverFired": "item_run",
    "NeverReached": "item_run",
    "Entry": "trace",
    "Faults": "faults",
    "Fired": "vocabulary",
    "NotDeterministicWarning": "determinism",
    "NotLinearizable": "linearizability",
    "Operation": "operation",
    "OracleError": "oracles",
    "Recorded": "history",
    "Trace": "trace",
    "UndecidedError": "linearizability",
    "UnfiredFault": "plan",
    "UnsupportedFault": "faults",
    "check_linearizable": "linearizability",
    "is_bit_exact": "determinism",
    "simulate": "decorator",
}

__all__ = [
    "Chaos",
    "ChaosPlan",
    "CleanupRunsWarning",
    "Entry",
    "Faults",
    "Fired",
    "HangError",
    "History",
    "LivenessError",
    "Model",
    "NeverFired",
    "NeverReached",
    "NotDeterministicWarning",
    "NotLinearizable",
    "Operation",
    "OracleError",
    "Recorded",
    "Trace",
    "UndecidedError",
    "UnfiredFault",
    "UnsupportedFault",
    "check_linearizable",
    "is_bit_exact",
    "simulate",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)


def __dir__() -> list[str]:
    return __all__
