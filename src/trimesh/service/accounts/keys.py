"""The keys of one round: what its members tell each other to connect, as `torch.distributed.Store` has them."""

from __future__ import annotations

from collections.abc import Sequence

from trimesh import limits
from trimesh.errors import ProtocolError

Answer = tuple[int, list[bytes]]
"""A number and values, as the question says."""


class RoundKeys:
    """Keys and values, and the questions about them.

    set [key] [value]; get [key, ...]; wait [key, ...]; check [key, ...]; delete [key]; count
    add [key] [] [number]; swap [key] [expected, desired]
    """

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}

    def ask(self, verb: str, keys: Sequence[str], values: Sequence[bytes], numbers: Sequence[int]) -> Answer | None:
        """Answer a question; None if it is to be asked again when another key was set.

        Raises:
            ProtocolError: There is no such question, or there are too many keys.
        """
        known = self._values
        match verb, list(keys), list(values), list(numbers):
            case "set", [str(key)], [bytes(value)], []:
                self._put(key, value)
                return 0, []
            case (("get" | "wait"), [_, *_] as wanted, [], []):
                if not all(key in known for key in wanted):
                    return None
                return 0, [known[key] for key in wanted] if verb == "get" else []
            case "check", wanted, [], []:
                return int(all(key in known for key in wanted)), []
            case "add", [str(key)], [], [int(amount)]:
                total = _number(known.get(key, b"0")) + amount
                self._put(key, str(total).encode())
                return total, []
            case "swap", [str(key)], [bytes(expected), bytes(desired)], []:
                found = known.get(key)
                if found == expected or (found is None and not expected):
                    self._put(key, desired)
                    return 0, [desired]
                return 0, [expected if found is None else found]
            case "delete", [str(key)], [], []:
                return int(known.pop(key, None) is not None), []
            case "count", [], [], []:
                return len(known), []
            case _:
                raise ProtocolError(f"the keys of a group have no question {verb!r} of {keys!r:.200}")

    def _put(self, key: str, value: bytes) -> None:
        if key not in self._values and len(self._values) >= limits.GROUP_KEYS:
            raise ProtocolError(f"a group has at most limits.GROUP_KEYS ({limits.GROUP_KEYS}) keys, got {key!r:.100}")
        self._values[key] = value


def _number(value: bytes) -> int:
    try:
        return int(value)
    except ValueError as error:
        raise ProtocolError(f"only a number can be added to, got {value[:40]!r}") from error
