"""Bugs that are planted in hosts are found: in simulation, and by the tests of sessions and tokens.

Each is found by a body that passes without it, under the same seeds.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from typing import Any, Final

import pytest
import trio
from tests.relay.oracle.frames import Frame, Resume
from tests.relay.oracle.machine import HostSession, ManyData
from tests.testing.actors import Worker
from tests.transport import casts
from tests.transport import test_host_session as sessions

from trimesh import HostLost, Isolate, MeshErrorGroup, leaves, limits
from trimesh._runtime.hosts import ManyHosts
from trimesh._runtime.peers.deaths import HostLoss, ReportedLosses
from trimesh._transport.messages.casts import CastBody
from trimesh._transport.relay import SessionEnding
from trimesh.errors import ProtocolError
from trimesh.ids import ProcId
from trimesh.jobs.identity import TokenLedger, proof_of
from trimesh.testing.simulated.job_host import SimJobHost
from trimesh.testing.simulated.seeded_run import SeededOptions, run_once

SEEDS: Final = 20

Plant = Callable[[pytest.MonkeyPatch], None]


# ---- sessions ------------------------------------------------------------------------------------------------


def bytes_cross_connections_that_break() -> None:
    for seed in range(SEEDS):
        sessions.break_connections_at_any_byte(seed)


def windows_bound_what_is_under_way() -> None:
    sessions.test_window_bounds_what_was_not_taken(sessions.Pair())


def another_session_is_refused() -> None:
    """A session at the same address that has begun later has another number."""
    pair, later = sessions.Pair(), HostSession(is_dialler=True, lease_seconds=3.0, session_id=6)
    pair.settle()
    pair.other.disconnect()
    pair.other.connect()
    later.connect()
    with pytest.raises(ProtocolError, match=r"resumes its session|begins once"):
        list(pair.other.receive(later.take(1 << 20)))


def silence_ends_a_session_in_time() -> None:
    sessions.test_silence_ends_a_session_by_its_own_ticks_and_beats_prevent_it(sessions.Pair())


def lose_a_frame_after_a_resume(patch: pytest.MonkeyPatch) -> None:
    resume = HostSession._resume

    def one_too_far(self: HostSession, said: Resume, ack: int) -> Any:
        news = resume(self, said, ack)
        self._again = min(1, len(self._kept))
        return news

    patch.setattr(HostSession, "_resume", one_too_far)


def send_all_again_after_a_resume(patch: pytest.MonkeyPatch) -> None:
    take, resume = HostSession._frame, HostSession._resume

    def from_the_first(self: HostSession, said: Resume, ack: int) -> Any:
        kept, kept_bytes = self._kept.copy(), self._kept_bytes
        news = resume(self, said, ack)
        self._kept, self._kept_bytes = kept, kept_bytes
        return news

    def again(self: HostSession, frame: Frame) -> Any:
        is_old = self.is_resumed and frame.payload and frame.number < self._expected
        return self._new_frame(frame) if is_old else take(self, frame)

    patch.setattr(HostSession, "_resume", from_the_first)
    patch.setattr(HostSession, "_frame", again)


def take_any_session(patch: pytest.MonkeyPatch) -> None:
    resume = HostSession._resume

    def whatever(self: HostSession, said: Resume, ack: int) -> Any:
        return resume(self, Resume(self._session_id or said.session, said.expected, self._session_id == 0), ack)

    patch.setattr(HostSession, "_resume", whatever)


def leak_credit(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(HostSession, "consumed", lambda self, channel, size: None)


def grant_too_much(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(limits, "HOST_WINDOW_BYTES", 2 * limits.HOST_WINDOW_BYTES)
    patch.setattr(sessions, "limits", _Before(HOST_WINDOW_BYTES=limits.HOST_WINDOW_BYTES // 2))


class _Before:
    """The limits that a test compares with, as they were."""

    def __init__(self, **values: int) -> None:
        self._values = values

    def __getattr__(self, name: str) -> Any:
        return self._values[name] if name in self._values else getattr(limits, name)


def end_leases_late(patch: pytest.MonkeyPatch) -> None:
    tick = HostSession.tick

    def late(self: HostSession, seconds: float) -> SessionEnding | None:
        ending = tick(self, seconds)
        return None if ending is SessionEnding.LEASE and self._silence < 2 * self._lease else ending

    patch.setattr(HostSession, "tick", late)


def folded_pieces_come_each() -> None:
    for seed in range(3):
        sessions.test_small_pieces_of_several_channels_share_frames_and_none_is_lost_or_doubled(seed)


def drop_one_of_what_was_folded(patch: pytest.MonkeyPatch) -> None:
    many = HostSession._many

    def but_the_last(self: HostSession, payload: bytes) -> Any:
        return ManyData(many(self, payload).pieces[:-1])

    patch.setattr(HostSession, "_many", but_the_last)


def each_leaf_of_a_cast_is_settled() -> None:
    with pytest.MonkeyPatch.context() as patch:
        casts.make_small(patch)
        for seed in range(SEEDS):
            casts.run(random.Random(seed))


def lose_a_leaf_of_a_cast(patch: pytest.MonkeyPatch) -> None:
    ready = CastBody.ready

    def but_the_last(self: CastBody, where: bytes) -> None:
        if len(self._waiting) > 1:
            self._waiting.popitem()
        ready(self, where)

    patch.setattr(CastBody, "ready", but_the_last)


def token_admits_once() -> None:
    ledger = TokenLedger(bytes(32))
    token, exporter, host = ledger.issue(0.0), b"e" * 32, ProcId(7)
    proof = proof_of(token.secret, exporter, token.mesh, host)
    first, second = (
        ledger.redeem(token.number, proof, exporter=exporter, incarnation=host, now=now) for now in (1.0, 2.0)
    )
    assert first
    assert not second


def keep_used_tokens(patch: pytest.MonkeyPatch) -> None:
    redeem = TokenLedger.redeem

    def kept(self: TokenLedger, number: bytes, proof: bytes, **about: Any) -> bool:
        issued = dict(self._issued)
        is_admitted = redeem(self, number, proof, **about)
        self._issued = issued
        return is_admitted

    patch.setattr(TokenLedger, "redeem", kept)


IN_SESSIONS: Final[list[tuple[Plant, Callable[[], None]]]] = [
    (lose_a_frame_after_a_resume, bytes_cross_connections_that_break),
    (send_all_again_after_a_resume, bytes_cross_connections_that_break),
    (take_any_session, another_session_is_refused),
    (leak_credit, windows_bound_what_is_under_way),
    (grant_too_much, windows_bound_what_is_under_way),
    (end_leases_late, silence_ends_a_session_in_time),
    (keep_used_tokens, token_admits_once),
    (drop_one_of_what_was_folded, folded_pieces_come_each),
    (lose_a_leaf_of_a_cast, each_leaf_of_a_cast_is_settled),
]


@pytest.mark.parametrize("body", dict.fromkeys(body for _, body in IN_SESSIONS))
def test_sessions_without_a_planted_bug_pass(body: Callable[[], None]) -> None:
    body()


@pytest.mark.parametrize(("plant", "body"), IN_SESSIONS)
def test_bug_planted_in_a_session_is_found(
    monkeypatch: pytest.MonkeyPatch, plant: Plant, body: Callable[[], None]
) -> None:
    """H3, H4."""
    plant(monkeypatch)
    with pytest.raises((AssertionError, ProtocolError, pytest.fail.Exception)):
        body()


# ---- hosts, simulated ----------------------------------------------------------------------------------------


async def one_host_is_given_up(host_mesh: Any, faults: Any) -> None:
    """A host that is cut off is one failure, with its place; the others take another mesh."""
    with pytest.raises(MeshErrorGroup) as caught:
        async with host_mesh.spawn_procs({"gpus": 2}) as procs, procs.spawn("w", Worker) as workers:
            faults.host(1).cut()
            await workers.slow.call(1000.0)
    (lost,) = leaves(caught.value)
    assert isinstance(lost, HostLost)
    assert dict(lost.point or {}) == {"hosts": 1}
    async with host_mesh.slice(hosts=0).spawn_procs({"gpus": 1}) as procs, procs.spawn("w", Worker) as workers:
        await workers.slow.call(0.01)


async def idle_host_is_lost(host_mesh: Any, faults: Any) -> None:
    """No mesh has a process there: the block of the job is told."""
    faults.host(0).lose()
    await trio.sleep(1)
    raise AssertionError("the block of the job goes on without its host")


async def others_go_on(host_mesh: Any, faults: Any) -> None:
    """Calls of a lost host end with it, those of others go on."""
    async with host_mesh.spawn_procs({"gpus": 1}, supervision=Isolate()) as procs, procs.spawn("w", Worker) as workers:
        heal = faults.host(1).cut()
        with pytest.raises(HostLost):
            await workers.slice(hosts=1, gpus=0).slow.call_one(1000.0)
        heal()
        await workers.slice(hosts=0, gpus=0).slow.call_one(0.01)


def end_the_agent_late(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(limits, "AGENT_LEASE_SECONDS", limits.HOST_LEASE_SECONDS + 0.5)


def tell_each_death(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ReportedLosses, "is_repeated", lambda self, error: False)


def forget_the_place(patch: pytest.MonkeyPatch) -> None:
    made = HostLoss.__call__

    def nowhere(self: HostLoss, *, maybe_executed: bool = True) -> Exception:
        return made(HostLoss(self.host, self.reason, self.text), maybe_executed=maybe_executed)

    patch.setattr(HostLoss, "__call__", nowhere)


def start_elsewhere(patch: pytest.MonkeyPatch) -> None:
    launch = ManyHosts.launch

    async def on_the_last(self: ManyHosts, request: Any, on_exit: Any) -> Any:
        return await launch(ManyHosts(self.hosts[-1:]), request, on_exit)

    patch.setattr(ManyHosts, "launch", on_the_last)


def forget_idle_hosts(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SimJobHost, "is_loss_taken", property(lambda self: True, lambda self, value: None), raising=False)


IN_HOSTS: Final[list[tuple[Plant, Callable[..., Awaitable[None]], str]]] = [
    (end_the_agent_late, one_host_is_given_up, "OR-9"),
    (tell_each_death, one_host_is_given_up, "ValueError"),
    (forget_the_place, one_host_is_given_up, "AssertionError"),
    (start_elsewhere, others_go_on, ""),
    (forget_idle_hosts, idle_host_is_lost, "AssertionError"),
]


def found(body: Callable[..., Awaitable[None]], seeds: int = SEEDS) -> str:
    """Return what the first seed that finds something says, or ""."""
    options = SeededOptions({"gpus": 1}, hosts=2)
    for seed in range(seeds):
        error = run_once(body, {"host_mesh": None, "faults": None}, options, seed).error
        causes = list(leaves(error)) if isinstance(error, BaseExceptionGroup) else [error]
        if body is idle_host_is_lost and all(isinstance(cause, HostLost) for cause in causes):
            continue
        if error is not None:
            return " ".join(repr(one) for one in causes)
    return ""


@pytest.mark.parametrize("body", dict.fromkeys(body for _, body, _ in IN_HOSTS))
def test_hosts_without_a_planted_bug_pass(body: Callable[..., Awaitable[None]]) -> None:
    assert found(body) == ""


@pytest.mark.parametrize(("plant", "body", "words"), IN_HOSTS)
def test_bug_planted_in_hosts_is_found(
    monkeypatch: pytest.MonkeyPatch, plant: Plant, body: Callable[..., Awaitable[None]], words: str
) -> None:
    """H2, H4."""
    plant(monkeypatch)
    said = found(body)
    assert said
    assert words in said
