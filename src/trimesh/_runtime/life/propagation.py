"""Context variables whose values travel with calls: `trimesh.propagate`."""

from __future__ import annotations

import copyreg
from contextvars import Context, ContextVar
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

from trimesh import limits
from trimesh._runtime.life.tracing import carry_values
from trimesh.errors import PayloadError

if TYPE_CHECKING:
    from trimesh._runtime.actors.server import Server
    from trimesh._runtime.calls.outgoing import OutgoingCall
    from trimesh._runtime.peers.incoming import IncomingCall
    from trimesh._wire.pickled.payload import Encoded

_UNSET: Final = object()
_WHAT: Final = "the values of propagated context variables"

_variables: Final[dict[str, ContextVar[Any]]] = {}
"""By name, in the order of their registration."""


def propagate(*variables: ContextVar[Any]) -> None:
    """Let the values of context variables travel with calls, from the caller's context to the endpoint's.

    Write it beside the variable, in a script or at the top of a module that both processes import. A call, stream, map,
    broadcast or request of a pool takes the values that are set where it is made; the endpoint, and what it calls, sees
    them. A variable that is not set does not travel, nor does one that the receiver has not registered. Values travel
    as arguments do; those of one call have at most `limits.PROPAGATED_BYTES_MAX` (4 KiB) bytes, else the call raises
    `TypeError`. What the endpoint sets does not come back.

    Args:
        *variables: Variables; both processes find them by their names.

    Raises:
        TypeError: An argument is no `ContextVar`.
        ValueError: Another variable of this name has been registered.

    Cost: none without a registered variable; a few microseconds for a call with values.
    """
    for variable in variables:
        given: object = variable
        if not isinstance(given, ContextVar):
            raise TypeError(f"propagate takes contextvars.ContextVar objects, got {given!r}: pass the variable itself")
        if _variables.setdefault(variable.name, variable) is not variable:
            raise ValueError(
                f"propagated variables are found by their names, got a second one of the name {variable.name!r}: "
                "give it another name, such as ContextVar('my_package.name')"
            )
    if variables:
        copyreg.pickle(ContextVar, _reduce)
        receive()


def receive() -> None:
    """Keep the values that come with calls, for variables that are registered here until the endpoint begins."""
    carry_values(_carrier)


def forget_all() -> None:
    """Undo `propagate` in this process, for tests of others."""
    _variables.clear()
    carry_values(None)


def _reduce(variable: ContextVar[Any]) -> tuple[Any, ...]:
    """Let code that is sent by value refer to a registered variable."""
    if _variables.get(variable.name) is not variable:
        raise TypeError(
            f"a ContextVar can be sent by its name only, got {variable!r}: write trimesh.propagate(...) first"
        )
    try:
        return _variable_named, (variable.name, (Context().run(variable.get),))
    except LookupError:
        return _variable_named, (variable.name, ())


def _variable_named(name: str, default: tuple[Any, ...]) -> ContextVar[Any]:
    """Return the registered variable of a name; make it if there is none yet."""
    if name not in _variables:
        propagate(ContextVar(name, default=default[0]) if default else ContextVar(name))
    return _variables[name]


class _Carrier:
    """Takes the values of registered variables along with calls."""

    def __init__(self) -> None:
        self._came: WeakKeyDictionary[IncomingCall, bytes] = WeakKeyDictionary()

    def is_laden(self) -> bool:
        return any(variable.get(_UNSET) is not _UNSET for variable in _variables.values())

    def sends(self, call: OutgoingCall) -> Encoded | None:
        found = {name: variable.get(_UNSET) for name, variable in _variables.items()}
        values = {name: value for name, value in found.items() if value is not _UNSET}
        if not values:
            return None
        encoded = call.proc.values.encode(values, what=_WHAT)
        if encoded.nbytes > limits.PROPAGATED_BYTES_MAX or encoded.buffers or encoded.attachments:
            raise TypeError(
                f"{_WHAT} must have at most limits.PROPAGATED_BYTES_MAX ({limits.PROPAGATED_BYTES_MAX}) bytes in all, "
                f"without buffers and ports, got {encoded.nbytes} for {', '.join(values)}: send them as arguments"
            )
        return encoded

    def came(self, call: IncomingCall, values: bytes) -> None:
        self._came[call] = values

    def enter(self, server: Server, call: IncomingCall, context: Context) -> None:
        payload = self._came.pop(call, None)
        if payload is None:
            return
        values = server.values.decode(payload, [], what=_WHAT)
        if not isinstance(values, dict):
            raise PayloadError(f"{_WHAT} must come as a dict, got {type(values).__qualname__}")
        for name, variable in _variables.items():
            if name in values:
                context.run(variable.set, values[name])


_carrier: Final = _Carrier()
