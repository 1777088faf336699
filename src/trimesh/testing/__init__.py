"""Public test kit: whole meshes in one process under a virtual clock, planned faults, and oracles.

`@trimesh.testing.simulate(seeds=200, per_host={"gpus": 4})` runs an async test under many seeds; the fixtures `mesh`,
`faults`, `fault_log` and `chaos` come from the pytest plugin `trimesh.testing.plugin`. docs/testing.md shows how.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from trimesh.testing.consistency import Inconsistent, check_fresh, check_monotonic, check_once
    from trimesh.testing.histories import (
        History,
        Model,
        NotLinearizable,
        Operation,
        Recorded,
        UndecidedError,
        check_linearizable,
    )
    from trimesh.testing.plans.chaos import Chaos, ChaosPlan, LivenessError
    from trimesh.testing.plans.determinism import NotDeterministicWarning, is_bit_exact
    from trimesh.testing.plans.fault import UnsupportedFault
    from trimesh.testing.plans.faults import Faults
    from trimesh.testing.plans.plan import Fired, UnfiredFault
    from trimesh.testing.real.host_network import HostNetwork, open_host_network, why_no_networks
    from trimesh.testing.real.launcher_cases import LAUNCHER_CASES, LauncherSubject, check_launcher
    from trimesh.testing.real.network_job import NetworkJob
    from trimesh.testing.running import NeverFired, NeverReached, simulate
    from trimesh.testing.simulated.oracles import Entry, OracleError, Trace
    from trimesh.testing.simulated.seeded_run import HangError
    from trimesh.testing.simulated.tasks import CleanupRunsWarning
    from trimesh.testing.substitution import substitute

_HOMES: Final = {
    "Chaos": "plans.chaos",
    "ChaosPlan": "plans.chaos",
    "CleanupRunsWarning": "simulated.tasks",
    "HangError": "simulated.seeded_run",
    "HostNetwork": "real.host_network",
    "History": "histories",
    "Inconsistent": "consistency",
    "LAUNCHER_CASES": "real.launcher_cases",
    "LauncherSubject": "real.launcher_cases",
    "LivenessError": "plans.chaos",
    "Model": "histories",
    "NetworkJob": "real.network_job",
    "NeverFired": "running",
    "NeverReached": "running",
    "Entry": "simulated.oracles",
    "Faults": "plans.faults",
    "Fired": "plans.plan",
    "NotDeterministicWarning": "plans.determinism",
    "NotLinearizable": "histories",
    "Operation": "histories",
    "OracleError": "simulated.oracles",
    "Recorded": "histories",
    "Trace": "simulated.oracles",
    "UndecidedError": "histories",
    "UnfiredFault": "plans.plan",
    "UnsupportedFault": "plans.fault",
    "check_fresh": "consistency",
    "check_launcher": "real.launcher_cases",
    "check_linearizable": "histories",
    "check_monotonic": "consistency",
    "check_once": "consistency",
    "open_host_network": "real.host_network",
    "is_bit_exact": "plans.determinism",
    "simulate": "running",
    "substitute": "substitution",
    "why_no_networks": "real.host_network",
}

__all__ = [
    "LAUNCHER_CASES",
    "Chaos",
    "ChaosPlan",
    "CleanupRunsWarning",
    "Entry",
    "Faults",
    "Fired",
    "HangError",
    "History",
    "HostNetwork",
    "Inconsistent",
    "LauncherSubject",
    "LivenessError",
    "Model",
    "NetworkJob",
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
    "check_fresh",
    "check_launcher",
    "check_linearizable",
    "check_monotonic",
    "check_once",
    "is_bit_exact",
    "open_host_network",
    "simulate",
    "substitute",
    "why_no_networks",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)


def __dir__() -> list[str]:
    return __all__
