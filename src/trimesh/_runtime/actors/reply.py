r"""Calls that are answered after their endpoint has returned, by a `Reply`.

    unanswered --send, fail--> answered
          \----cancel of the caller, end of the actor, loss of the reply----> over

RP-1 each call is answered once, by exactly one terminal frame, whoever comes first.
RP-2 a reply that is lost answers by an error: no caller waits for what cannot come.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

import trio

from trimesh._runtime.tasks.foreign import in_trio
from trimesh.errors import MeshError

if TYPE_CHECKING:
    from trimesh._runtime.peers.incoming import IncomingCall
    from trimesh._runtime.values.codec import Values
    from trimesh.errors import Origin

T = TypeVar("T")
T_contra = TypeVar("T_contra", contravariant=True)


class LateAnswer:
    """The answer to one call, as its actor sees it.

    Args:
        origin: Coordinates that an error carries.
        on_lost_error: Told of the error of a call that has no caller, or none any more.

    Attributes:
        over: Set once no answer is wanted any more.
        is_lost: Whether the `Reply` has been dropped unused.
    """

    def __init__(
        self,
        call: IncomingCall,
        values: Values,
        origin: Origin,
        on_lost_error: Callable[[IncomingCall, Exception], None],
    ) -> None:
        self.call = call
        self.over = trio.Event()
        self.is_used = False
        self.has_returned = False
        self.is_lost = False
        self.on_answered: Callable[[], object] | None = None
        self._values = values
        self._origin = origin
        self._on_lost_error = on_lost_error
        self._token = trio.lowlevel.current_trio_token()

    def cut(self) -> None:
        """Learn that the caller, or the actor, waits for it no more."""
        self.over.set()

    def returned(self) -> bool:
        """Learn that the endpoint has returned; return whether an answer is to come."""
        self.has_returned = True
        if self.is_lost:
            self._fail_lost()
        return not self.call.ended

    def send(self, value: object) -> None:
        """Answer by a value, in Trio."""
        self._check_unused()
        call = self.call
        if not call.ended and not call.is_broadcast:
            call.returned(self._values.encode_result(value, call.spec))
        self._answered()

    def fail(self, error: BaseException) -> None:
        """Answer by an error, in Trio."""
        self._check_unused()
        call = self.call
        if call.is_broadcast and isinstance(error, Exception):
            self._on_lost_error(call, self._values.local_error(error, self._origin))
        elif not call.ended:
            call.raised(self._values.encode_error(error, self._origin))
        self._answered()

    def _check_unused(self) -> None:
        if self.is_used:
            raise RuntimeError(f"a Reply answers one call once, got a second answer to {self.call.spec.name}")

    def _answered(self) -> None:
        self.is_used = True
        self.call.ended = True
        self.over.set()
        if self.on_answered is not None:
            self.on_answered()

    def seconds_left(self) -> float:
        """Return for how long the caller will wait."""
        deadline = self.call.deadline
        return math.inf if deadline == math.inf else max(0.0, deadline - trio.current_time())

    def run(self, function: Callable[..., T], *args: Any) -> T:
        """Call a function of this object in the thread of Trio."""
        if trio.lowlevel.in_trio_run():
            return function(*args)
        return trio.from_thread.run_sync(function, *args, trio_token=self._token)

    def drop(self) -> None:
        """Learn, in any thread and at any moment, that there is no `Reply` any more."""
        if not self.is_used:
            with suppress(trio.RunFinishedError):
                self._token.run_sync_soon(self._lost)

    def _lost(self) -> None:
        self.is_lost = True
        if self.has_returned:
            self._fail_lost()

    def _fail_lost(self) -> None:
        """Answer by an error, unless the call has ended or has no caller."""
        if not self.is_used and not self.call.ended:
            name = self.call.spec.name
            self.fail(MeshError(f"{name} was not answered: its Reply was dropped; keep it until `reply.send(...)`"))


class Reply(Generic[T_contra]):
    """Answers one call of an endpoint with `reply="later"`, from any task or thread of the actor's process.

    It is used once: `send` or `fail`. Dropped unused, it answers by a `MeshError`. Once the caller has cancelled, or
    the actor has ended, an answer is ignored. It stays in its process: to be answered from elsewhere, send a
    `Port`.
    """

    __slots__ = ("_answer",)

    def __init__(self, answer: LateAnswer) -> None:
        self._answer = answer

    def send(self, value: T_contra) -> None:
        """Answer with the result of the call; what it shares memory with must not be written to afterwards.

        Raises:
            TypeError: The value cannot be serialised; the call can still be answered.
            RuntimeError: It has been answered.
        """
        self._answer.run(self._answer.send, value)

    def fail(self, error: BaseException) -> None:
        """Answer with an error, which the caller gets as if the endpoint had raised it.

        Of a broadcast it fails the block that owns the actor, as every error without a caller does.

        Raises:
            RuntimeError: It has been answered.
        """
        self._answer.run(self._answer.fail, error)

    @property
    def is_over(self) -> bool:
        """Whether no answer is wanted: it was given, the caller has cancelled, or the actor has ended."""
        return self._answer.over.is_set()

    @property
    def seconds_left(self) -> float:
        """How long the caller will wait, `math.inf` without a deadline."""
        return self._answer.run(self._answer.seconds_left)

    async def wait_over(self) -> None:
        """Wait until no answer is wanted; a checkpoint."""
        await in_trio(self._answer.over.wait)()

    def __del__(self) -> None:
        self._answer.drop()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a Reply must be used in the process of its actor: to be answered from elsewhere, send a Port, and answer "
            "with what its Receiver gets"
        )
