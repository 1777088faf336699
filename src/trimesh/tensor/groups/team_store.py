"""`TeamStore`: the `torch.distributed.Store` of a team, over the links of its processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch.distributed import distributed_c10d

from trimesh import limits

if TYPE_CHECKING:
    from trimesh.tensor.protocol.messages import Answer


_c10d: Any = distributed_c10d  # whose stub leaves out the stores


class TeamStore(_c10d.Store):  # type: ignore[misc]
    """The keys of one team; may be used from any thread but that of Trio's loop.

    Args:
        ask: Asks the store: takes a verb, keys, values, numbers and `seconds`; see `TeamTable`.
    """

    def __init__(self, ask: Callable[..., Answer]) -> None:
        super().__init__()
        self._ask = ask
        self._seconds = limits.COLLECTIVE_SECONDS

    def set(self, key: str, value: Any) -> None:
        self._ask("set", [key], [_bytes(value)])

    def get(self, key: str) -> bytes:
        """Wait until there is a key; return its value."""
        return self._ask("get", [key], seconds=self._seconds).values[0]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until there are some keys."""
        self._ask("wait", list(keys), seconds=self._seconds if timeout is None else timeout.total_seconds())

    def check(self, keys: Sequence[str]) -> bool:
        """Tell whether there are some keys, now."""
        return bool(self._ask("check", list(keys)).number)

    def add(self, key: str, amount: int) -> int:
        """Add to a number; return the sum."""
        return self._ask("add", [key], [], [amount]).number

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        """Set a key that has an expected value, or that there is none of; return what it is then."""
        return self._ask("swap", [key], [_bytes(expected), _bytes(desired)]).values[0]

    def delete_key(self, key: str) -> bool:
        """Forget a key; tell whether there was one."""
        return bool(self._ask("delete", [key]).number)

    deleteKey = delete_key  # noqa: N815 - what torch calls from C++

    def num_keys(self) -> int:
        return self._ask("count", []).number

    getNumKeys = num_keys  # noqa: N815 - what torch calls from C++

    def set_timeout(self, timeout: timedelta) -> None:
        """Wait this long for keys."""
        self._seconds = timeout.total_seconds()


def _bytes(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
