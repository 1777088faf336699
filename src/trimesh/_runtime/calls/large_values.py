"""Large values that travel by value: logged once for each endpoint, with what to write instead."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trimesh._runtime.life.proc import Proc

_log = logging.getLogger("trimesh")


class LargeValues:
    """Endpoints that a process has logged."""

    def __init__(self) -> None:
        self.logged: set[tuple[str, str]] = set()


def note_large(proc: Proc, endpoint: str, kind: str, nbytes: int) -> None:
    """Log a value of at least `limits.LARGE_VALUE_BYTES`, once for each endpoint.

    Args:
        kind: "arguments" or "result".
    """
    found = proc.above.setdefault(LargeValues, LargeValues())
    assert isinstance(found, LargeValues)
    if (endpoint, kind) in found.logged:
        return
    found.logged.add((endpoint, kind))
    _log.warning(
        "%s: %s of %.1f GiB by value, copied for each member. Send an RDMABuffer and let the other side read it, or "
        "publish weights (docs/rdma.md); logged once for this endpoint",
        endpoint,
        kind,
        nbytes / 2**30,
    )
