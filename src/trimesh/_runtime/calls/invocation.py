"""Invocation of an endpoint on many actors, with one result for each rank; all verbs use it.

The verbs differ only in how they combine the results.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import attrs
import msgspec
import trio
from trio.lowlevel import checkpoint, checkpoint_if_cancelled

from trimesh import limits
from trimesh._routing.collector import POSTED, LocalFailure, MergedItem, Outcome, Raised, Returned
from trimesh._runtime.calls.outgoing import OutgoingCall
from trimesh._runtime.peers.peer import Outbox, Parcel, SpreadParcel, Target
from trimesh._runtime.tasks.background import effective_deadline, without_consequences
from trimesh._runtime.values.codec import describe, place_payload
from trimesh._runtime.values.endpoint_spec import AGENT_ENDPOINTS, EndpointSpec
from trimesh._transport.interface import Buffer
from trimesh._wire import messages
from trimesh._wire.memory import DefinitionId
from trimesh._wire.messages import CallerPlace, SentView
from trimesh._wire.pickled.payload import Encoded
from trimesh.errors import (
    ActorFailed,
    MembershipChanged,
    MeshError,
    MeshStopped,
    Origin,
    RemoteCancelled,
    Unresponsive,
    add_note,
    origin,
    place_name,
    set_origin,
)
from trimesh.ids import AGENT, CallId, MeshId

if TYPE_CHECKING:
    from trimesh._runtime.life.proc import Proc


class Ok(msgspec.Struct, frozen=True):
    """A rank returned this value; immutable."""

    value: Any


class Err(msgspec.Struct, frozen=True):
    """A rank failed.

    Attributes:
        error: The exception, which carries its coordinates.
        is_raised: Whether the endpoint raised it; else the call failed in transit.
    """

    error: Exception
    is_raised: bool = False


class Cut(msgspec.Struct, frozen=True):
    """A rank was cancelled on our own request: neither a value nor a failure."""


Result = Ok | Err | Cut

_POSTED: Final = Ok(None)
"""Result of a broadcast that was sent."""


def encode_request(
    proc: Proc,
    request: Request,
    call_id: int,
    mesh: MeshId,
    budget: float | None,
    *,
    window: int = 0,
    arguments: tuple[tuple[Any, ...], dict[str, Any]] | None = None,
    value: Encoded | None = None,
) -> Parcel:
    """Encode a call once for all ranks, or for each if their arguments differ.

    Args:
        request: Endpoint and arguments.
        call_id: 0 for a broadcast.
        budget: Seconds left, or None.
        window: Items that a generator endpoint may be ahead.
        arguments: Replace those of the request.
        value: The arguments, if they are already encoded.

    Raises:
        TypeError: An argument cannot be serialised; the text names the endpoint.
    """
    if value is None:
        if request.each is not None:
            return _encode_each(proc, request, call_id, mesh, budget, window)
        args, kwargs = (request.args, request.kwargs) if arguments is None else arguments
        value = proc.values.encode_call(args, kwargs, request, request.spec or AGENT_ENDPOINTS.get(request.endpoint))
    payload: bytes = value.payload
    bodies: Sequence[Buffer] = value.buffers
    if len(payload) > limits.HEAD_PAYLOAD_BYTES_MAX:
        payload, bodies = place_payload(value)
    head = messages.encode(
        messages.Call(call_id, mesh, request.endpoint, budget, payload, window, request.view, request.caller)
    )
    definitions = value.definitions
    if request.definitions:
        definitions = (*definitions, *request.definitions)
    nbytes = len(head)
    if bodies:
        nbytes += sum(memoryview(body).nbytes for body in bodies)
        if nbytes >= limits.LARGE_VALUE_BYTES:
            note_large(proc, request.what, "arguments", nbytes)
    # Calls of one actor keep their order; those of the agent (flow 0) with all others, so that its stop comes last.
    flow = 0 if value.attachments else mesh
    return Parcel(head, bodies, definitions, nbytes, value.attachments, flow)


def _encode_each(proc: Proc, request: Request, call_id: int, mesh: MeshId, budget: float | None, window: int) -> Parcel:
    assert request.each is not None
    parcels: list[Parcel] = []
    for index, (args, kwargs) in enumerate(request.each):
        one = msgspec.structs.replace(request, args=args, kwargs=kwargs, each=None)
        try:
            parcels.append(encode_request(proc, one, call_id, mesh, budget, window=window))
        except TypeError as error:
            add_note(error, f"this argument is for {place_name(request.mesh, request.origin(index).point)} only")
            raise
    if len(parcels) == 1:
        return parcels[0]
    attachments = [thing for parcel in parcels for thing in parcel.attachments]
    nbytes = max((parcel.nbytes for parcel in parcels), default=0)
    return SpreadParcel(b"", nbytes=nbytes, attachments=attachments, each=parcels)


@trio.lowlevel.enable_ki_protection
async def invoke(
    proc: Proc, targets: Sequence[Target], request: Request, *, fail_fast: bool, errors_win: bool = True
) -> list[Result]:
    """Call every target and return one result each, in order.

    Args:
        targets: Members of one mesh.
        request: Endpoint and arguments.
        fail_fast: The first failure cancels the other ranks.
        errors_win: When the caller is cancelled while a rank raises, return the results instead of raising
            `Cancelled`, so that the error is not masked.

    Raises:
        TypeError: An argument cannot be serialised; nothing was sent.
        trio.Cancelled: The caller's scope was cancelled; the ranks have unwound or were abandoned (rule C2).
    """
    await checkpoint_if_cancelled()
    call = begin(proc, targets, request, effective_deadline(), fail_fast=fail_fast)
    return await finish(call, errors_win=errors_win)


def begin(
    proc: Proc,
    targets: Sequence[Target],
    request: Request,
    deadline: float,
    *,
    fail_fast: bool,
    awaiters: Sequence[trio.lowlevel.Task] = (),
) -> OutgoingCall:
    """Send a call, which the caller has to `finish`.

    Args:
        targets: Members of one mesh.
        request: Endpoint and arguments.
        deadline: Deadline of the caller (Trio time).
        fail_fast: The first failure cancels the other ranks.
        awaiters: Tasks that want the outcome (a live collection), if they are not the one that finishes it.

    Raises:
        TypeError: An argument cannot be serialised; nothing was sent.
    """
    is_bounded = deadline != math.inf
    budget = budget_until(proc, deadline) if is_bounded else None
    call_id = proc.new_call_id()
    parcel = encode_request(proc, request, call_id, targets[0].mesh if targets else AGENT, budget)
    call = OutgoingCall(
        proc, call_id, request, targets, fail_fast=fail_fast, budget=budget, is_bounded=is_bounded, awaiters=awaiters
    )
    call.start(parcel)
    return call


@trio.lowlevel.enable_ki_protection
async def finish(call: OutgoingCall, *, errors_win: bool = True) -> list[Result]:
    """Wait for a call that has begun; return one result for each target; see `invoke`."""
    try:
        await call.wait()
        if call.collector.failures:
            await yield_to_cancel(list(call.collector.failed()))
    except trio.Cancelled as cut:
        call.proc.deadlocks.circles.explain(cut, call.call_id)
        if not errors_win or not any(isinstance(outcome, Raised) for outcome in call.collector.failed()):
            raise
        results = results_of(call, cancelled=True)
        if not any(isinstance(result, Err) for result in results):
            raise
        return results
    return results_of(call)


async def yield_to_cancel(outcomes: Sequence[Outcome]) -> None:
    """Let a cancel of the caller take precedence over failures with the same cause.

    Args:
        outcomes: Outcomes of the failed ranks.

    Raises:
        trio.Cancelled: The budget ended the call remotely just before the caller's scope expired. Or a process died,
            and the owning block cancelled the caller for it while the caller waited for acknowledgements (X3).
    """
    if any(isinstance(outcome, messages.CancelAck) and outcome.by == "budget" for outcome in outcomes):
        await absorb_budget()
    if any(isinstance(outcome, LocalFailure) for outcome in outcomes):
        await checkpoint_if_cancelled()


@trio.lowlevel.enable_ki_protection
async def invoke_until(proc: Proc, targets: Sequence[Target], request: Request, deadline: float) -> list[Result]:
    """Call every target while leaving a block: wait at most until `deadline` (Trio time), never cancel.

    Ranks that have not replied by then yield an `Unresponsive` error; their owner will end them.
    """
    call_id = proc.new_call_id()
    parcel = encode_request(proc, request, call_id, targets[0].mesh if targets else AGENT, None)
    call = OutgoingCall(proc, call_id, request, targets, fail_fast=False, is_bounded=True)
    call.start(parcel)
    await call.wait_until(deadline)
    return results_of(call)


@trio.lowlevel.enable_ki_protection
async def post(proc: Proc, targets: Sequence[Target], request: Request) -> list[Result]:
    """Broadcast to every target; return an Ok or Err for each when all messages have left.

    It has no budget: it belongs to the block that owns the mesh, and may outlast the caller's scope.
    """
    await checkpoint_if_cancelled()
    parcel = encode_request(proc, request, 0, targets[0].mesh if targets else AGENT, None)
    if _post_at_once(proc, targets, parcel):
        if not (proc.transport.skips_left and proc.transport.skip_turn()):
            await checkpoint()
        return [_POSTED] * len(targets)
    call = OutgoingCall(proc, CallId(0), request, targets, fail_fast=False, is_bounded=has_deadline())
    call.start(parcel)
    await call.wait()
    return results_of(call)


@trio.lowlevel.enable_ki_protection
def post_nowait(proc: Proc, targets: Sequence[Target], request: Request) -> list[Result]:
    """Broadcast to every target now.

    Raises:
        trio.WouldBlock: A mailbox is full; nothing was sent.
    """
    parcel = encode_request(proc, request, 0, targets[0].mesh if targets else AGENT, None)
    if _post_at_once(proc, targets, parcel):
        return [_POSTED] * len(targets)
    for target in targets:
        if target.peer.death is None and not target.peer.outbox(target.mesh).has_room(parcel.nbytes):
            raise trio.WouldBlock
    call = OutgoingCall(proc, CallId(0), request, targets, fail_fast=False)
    call.start(parcel)
    call.forget()
    return results_of(call)


def _post_at_once(proc: Proc, targets: Sequence[Target], parcel: Parcel) -> bool:
    """Broadcast if no message has to wait and no target has failed; else do nothing and return False.

    This fast path keeps no record of the broadcast.
    """
    if parcel.bodies or parcel.attachments or type(parcel) is SpreadParcel:
        return False  # buffers may have to wait, and attachments may be refused
    boxes: list[Outbox] = []
    for target in targets:
        peer = target.peer
        if peer.link is None:
            return False
        box = peer.outbox(target.mesh)
        if len(targets) == 1:
            return box.try_send(parcel) is not None
        if not box.has_room(parcel.nbytes):
            return False
        boxes.append(box)
    for box in boxes:
        box.peer.prepare(parcel.definitions, ())
    proc.cast([box.peer for box in boxes], parcel)  # lends no buffers: the head is immutable
    for box in boxes:
        box.count(parcel.nbytes)
    return True


def has_deadline() -> bool:
    """Return whether the running task has a deadline."""
    return effective_deadline() != math.inf


def remaining_budget(proc: Proc) -> float | None:
    """Return the seconds until the running task's deadline, or None without one."""
    return budget_until(proc, effective_deadline())


def budget_until(proc: Proc, deadline: float) -> float | None:
    """Return the seconds left until `deadline` (Trio time; `math.inf` for none), or None.

    Virtual seconds have no meaning in another process, so they are not sent (rule C3).
    """
    if deadline == math.inf:
        return None
    if not proc.is_simulated and type(trio.lowlevel.current_clock()).__name__ == "MockClock":
        return None
    return max(0.0, deadline - trio.current_time())


async def absorb_budget() -> None:
    """Wait for the caller's own scope if it is about to expire: the budget ended the call remotely (rule C3)."""
    deadline = effective_deadline()
    if deadline - trio.current_time() <= limits.DEADLINE_SKEW_SECONDS:
        await trio.sleep_until(deadline)
        await checkpoint()


def results_of(call: OutgoingCall, *, cancelled: bool = False) -> list[Result]:
    """Return the result of each rank of a call.

    Args:
        call: Complete or abandoned call.
        cancelled: Whether the caller is cancelled, so that only errors raised by endpoints are reported.
    """
    results: list[Result] = []
    for index, outcome in enumerate(call.collector.outcomes):
        if type(outcome) is Returned:
            results.append(value_of(call, outcome, index))
        else:
            results.append(_unreturned(call, outcome, index, cancelled=cancelled))
    return results


def result_of(call: OutgoingCall, index: int) -> Result:
    """Return the result of the rank at an index; see `results_of`."""
    outcome = call.collector.outcomes[index]
    if type(outcome) is Returned:
        return value_of(call, outcome, index)
    return _unreturned(call, outcome, index, cancelled=False)


def _unreturned(call: OutgoingCall, outcome: Outcome | None, index: int, *, cancelled: bool) -> Result:
    where = call.request.origin(index)
    result = _failure(call.proc, outcome, call.request, where)
    return Cut() if cancelled and isinstance(result, Err) and not is_news(result, where) else result


def is_news(result: Err, where: Origin) -> bool:
    """Return whether a cancelled caller must still get an error, because an endpoint raised it.

    The end of a process or actor is reported by its owner, and a stop that was cancelled together with the caller is
    not reported.
    """
    return result.is_raised and not _is_victim(result.error, where) and without_consequences(result.error) is not None


def _is_victim(error: Exception, where: Origin) -> bool:
    """Return whether `error` is only a follow-on error: the actor itself failed while it ran the call."""
    found = origin(error)
    return (
        isinstance(error, ActorFailed)
        and found is not None
        and (found.mesh, found.point, found.endpoint) == (where.mesh, where.point, None)
    )


def value_of(call: OutgoingCall, outcome: Returned | MergedItem, index: int) -> Ok | Err:
    """Decode a rank's result, or an item of its stream."""
    proc, request = call.proc, call.request
    if outcome is POSTED:
        return _POSTED
    if outcome.bodies:
        nbytes = sum(memoryview(body).nbytes for body in outcome.bodies)
        if nbytes >= limits.LARGE_VALUE_BYTES:
            note_large(proc, request.what, "result", nbytes)
    try:
        spec = request.spec or AGENT_ENDPOINTS.get(request.endpoint)
        return Ok(proc.values.decode_result(outcome.payload, outcome.bodies, spec))
    except Exception as error:  # noqa: BLE001 - unpickling runs user code; the error is the rank's
        return broken_value(error, request, index)


def broken_value(error: Exception, request: Request, index: int) -> Err:
    """Return the error of a rank whose result cannot be decoded here."""
    set_origin(error, request.origin(index))
    add_note(error, f"raised while decoding the result of {request.what}()")
    return Err(error)


def _failure(proc: Proc, outcome: Outcome | None, request: Request, where: Origin) -> Result:
    match outcome:
        case Raised(payload=payload):
            return Err(proc.values.decode_error(payload), is_raised=True)
        case messages.CancelAck(by="caller"):
            return Cut()
        case messages.CancelAck(by="stopped", reason=reason):
            text = f"{request.mesh} was stopped before {request.endpoint} ended: {reason}"
            return _located(MeshStopped(text), where, request)
        case messages.CancelAck(by="left", started=started):
            return _located(MembershipChanged(_left(request), maybe_executed=started), where, request)
        case messages.CancelAck(reason=reason):
            return _located(RemoteCancelled(reason=reason, canceller=where.mesh), where, request)
        case messages.Refused(kind="stopped", text=text):
            return _located(MeshStopped(f"{request.mesh} accepts no more messages: {text}"), where, request)
        case messages.Refused(kind="left"):
            return _located(MembershipChanged(_left(request), maybe_executed=False), where, request)
        case messages.Refused(text=text):
            return _located(MeshError(f"{request.mesh} refused a message: {text}"), where, request)
        case LocalFailure(error=error):
            return _located(error, where, request)
        case None:
            text = f"{request.what} did not acknowledge its cancel in time and was abandoned; it may still run"
            return _located(Unresponsive(text), where, request)
        case _:
            return Cut()


def _left(request: Request) -> str:
    return (
        f"a member that {request.what} was called on has left the mesh, which was resized: call the members of "
        "`await trimesh.current_view(mesh)`"
    )


def _located(error: Exception, where: Origin, request: Request) -> Err:
    set_origin(error, attrs.evolve(where, endpoint=request.endpoint))
    if where.point is not None:
        add_note(error, describe(where))
    return Err(error)


# ---- request: endpoint and arguments, in the form common to all verbs ------------------------------------------------


class Request(msgspec.Struct, frozen=True, eq=False):
    """Endpoint and arguments of a call.

    Attributes:
        args, kwargs: Arguments, already bound against the signature.
        origin: Returns the coordinates of the rank at an index of the targets.
        spec: The endpoint; None for an agent's, which are identified by name.
        definitions: Further code that the callee needs, for values that are encoded within `args`.
        each: Arguments of each target, instead of `args` and `kwargs`, when they differ.
        view, caller: Target view and caller place for the message head.
        abandon_after: Seconds that a cancelled caller waits for acknowledgements; None for the usual bound.
    """

    mesh: str
    endpoint: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    origin: Callable[[int], Origin]
    spec: EndpointSpec | None = None
    definitions: Sequence[DefinitionId] = ()
    abandon_after: float | None = None
    each: Sequence[tuple[tuple[Any, ...], dict[str, Any]]] | None = None
    view: SentView | None = None
    caller: CallerPlace | None = None

    @property
    def what(self) -> str:
        """Name of the endpoint, for messages."""
        return f"{self.mesh}.{self.endpoint}"

    def __str__(self) -> str:
        return self.what


# ---- large values that travel by value: logged once for each endpoint, with what to write instead --------------------

_log = logging.getLogger("trimesh")


class LargeValues:
    """Endpoints whose large values a process has logged."""

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
        "%s: %s of %.1f GiB sent by value, one copy for each member. Send an RDMABuffer that the other side reads, or "
        "publish weights (docs/rdma.md); logged once for this endpoint",
        endpoint,
        kind,
        nbytes / 2**30,
    )
