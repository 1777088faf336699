"""Bugs to plant in slots, replay buffers and publications, which the workload of the whole loop must find."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any, Final

from tests.service.loop_workload import run_schedule
from tests.soak import mutations
from tests.soak.mutations import Finding, Mutation

from trimesh.rdma.publications import board
from trimesh.service.accounts import ReplayAccount, SlotAccount
from trimesh.service.slots import Slots

_RULE: Final = re.compile(r"\b(OR|LW)-\d+")


def find(mutation: Mutation, seeds: Iterable[int], rule: str | None = None) -> Finding | None:
    """Return what the workload of the loop finds; see `tests.soak.mutations.find`."""
    return mutations.find(mutation, seeds, rule, run=run_schedule, rules=_RULE)


def _always(value: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    return lambda real: lambda *args, **kwargs: value


def _keep_confirmed(real: Callable[..., Any]) -> Callable[..., Any]:
    def confirm(self: ReplayAccount, hold: int) -> None:
        items = [*self.holds[hold][1]]
        real(self, hold)
        self.items = {**{item.number: item for item in items}, **self.items}

    return confirm


def _forget_held(real: Callable[..., Any]) -> Callable[..., Any]:
    def put_back(self: ReplayAccount, hold: int) -> None:
        real(self, hold)
        self.items.popitem()

    return put_back


def _free_early(real: Callable[..., Any]) -> Callable[..., Any]:
    del real
    return property(lambda self: 0)  # type: ignore[return-value]


def _never_end(real: Callable[..., Any]) -> Callable[..., Any]:
    def end(self: Slots, lease: Any, *, well: bool) -> None:
        if well:
            real(self, lease, well=well)

    return end


def _newest_first(real: Callable[..., Any]) -> Callable[..., Any]:
    def grant(self: SlotAccount) -> Any:
        self._waiting.reverse()
        return real(self)

    return grant


_TABLE: Final[dict[str, tuple[Any, ...]]] = {
    "unpinned": ("a publisher overwrites what is pinned", board, "pinned", _always(()), "LW-6"),
    "stale": ("what is too old is not evicted", ReplayAccount, "_is_stale", _always(False), "LW-3"),
    "again": ("what was taken is stored, too", ReplayAccount, "confirm", _keep_confirmed, "LW-2"),
    "dropped": ("an item of a consumer that has died is lost", ReplayAccount, "put_back", _forget_held, "LW-2"),
    "not-returned": (
        "the slots of work that has failed are not free again",
        Slots,
        "_end",
        _never_end,
        "LivenessError",
    ),
    "unbounded": ("stored items use no slots", ReplayAccount, "slots", _free_early, "LW-3"),
}

MUTATIONS: Final = {
    name: Mutation(text, ((owner, function, make),), rule, 0)
    for name, (text, owner, function, make, rule) in _TABLE.items()
}
"""By name."""
