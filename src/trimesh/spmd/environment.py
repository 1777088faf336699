"""The environment that torchrun gives the ranks of a program. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec


class HostPlace(msgspec.Struct, frozen=True):
    """Where a rank is.

    Attributes:
        host: Differs between hosts, and is the same for all ranks of one.
        address: What others reach this host by.
    """

    host: str
    address: str


def environments(places: Sequence[HostPlace], port: int, run_id: str) -> list[dict[str, str]]:
    """Return the variables of each rank, those that only differ between launchers left out.

    Args:
        places: Where each rank is.
        port: On the host of rank 0, for its store.
        run_id: The same for all ranks, and for no other run.
    """
    hosts = list(dict.fromkeys(place.host for place in places))
    sizes = Counter(place.host for place in places)
    before: Counter[str] = Counter()
    found: list[dict[str, str]] = []
    for rank, place in enumerate(places):
        variables: Mapping[str, object] = {
            "RANK": rank,
            "WORLD_SIZE": len(places),
            "LOCAL_RANK": before[place.host],
            "LOCAL_WORLD_SIZE": sizes[place.host],
            "GROUP_RANK": hosts.index(place.host),
            "GROUP_WORLD_SIZE": len(hosts),
            "ROLE_NAME": "default",
            "ROLE_RANK": rank,
            "ROLE_WORLD_SIZE": len(places),
            "MASTER_ADDR": places[0].address if len(hosts) > 1 else "127.0.0.1",
            "MASTER_PORT": port,
            "TORCHELASTIC_RESTART_COUNT": 0,
            "TORCHELASTIC_MAX_RESTARTS": 0,
            "TORCHELASTIC_RUN_ID": run_id,
            "TORCHELASTIC_USE_AGENT_STORE": False,  # rank 0 has the store, on the port that is kept for it
        }
        before[place.host] += 1
        found.append({name: str(value) for name, value in variables.items()})
    return found
