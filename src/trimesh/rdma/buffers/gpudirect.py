"""`python -m trimesh.rdma --gpudirect`: whether adapters of two machines reach the CUDA devices of both, step by step.

No mesh is made: each side has a mover of its own, and tells the other how it is reached, by signed lines. The one
serves; the other asks it to look at itself, moves bytes, then has it move bytes the other way.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, Final

import attrs
import msgspec
import trio

from trimesh import limits
from trimesh._transport.interface import Attachment, End, Grant, Transfer, TransferError, TransferKind
from trimesh._transport.native.mover import NativeMover
from trimesh.config import reread
from trimesh.errors import ProtocolError
from trimesh.ids import ID_MAX, ProcId
from trimesh.rdma.buffers.gpudirect_side import (
    CheckedSide,
    CheckLine,
    MakeMemory,
    Reached,
    TriedHostMemory,
    TriedMemory,
    numbers,
    on_device,
)
from trimesh.rdma.buffers.signed_lines import ASKED, ASKING, SignedLines

NBYTES: Final = 64 << 20

Tell = Callable[[object], None]


# ---- moving ----------------------------------------------------------------------------------------------------------


@attrs.frozen
class CheckedMoves:
    """Transfers of one side with the memory of the other one."""

    side: CheckedSide
    attachment: Attachment
    theirs: Reached

    def ways(self) -> list[tuple[str, TriedMemory, str, Grant]]:
        """Return each pair of memory here and there, with names."""
        granted = {"device": self.theirs.device, "host": self.theirs.host}
        return [
            (here, piece, there, grant)
            for here, piece in self.side.pieces().items()
            for there, grant in granted.items()
            if grant is not None
        ]

    async def read(self, here: str, piece: TriedMemory, there: str, grant: Grant, seed: int) -> CheckLine:
        name = f"read {there} there to {here} here"
        piece.put(bytes(self.side.nbytes))
        seconds, why = await self._move(TransferKind.READ, piece, grant)
        if why:
            return CheckLine(name, ok=False, text=why)
        try:
            piece.settle()
        except RuntimeError as error:
            return CheckLine(name, ok=False, text=f"{error}; buffers go through pinned memory then")
        return self._line(name, seconds, ok=piece.get() == numbers(self.side.nbytes, seed))

    async def write(
        self, here: str, piece: TriedMemory, there: str, grant: Grant, seed: int
    ) -> tuple[CheckLine, float]:
        """Write; the other side compares."""
        piece.put(numbers(self.side.nbytes, seed))
        seconds, why = await self._move(TransferKind.WRITE, piece, grant)
        # A read pushes what was written before (GD-2 of memory/adapters).
        byte = TriedHostMemory(bytearray(1))
        why = why or (await self._move(TransferKind.READ, byte, grant))[1]
        return CheckLine(f"write {here} here to {there} there", ok=not why, text=why), seconds

    async def _move(self, kind: TransferKind, piece: TriedMemory, grant: Grant) -> tuple[float, str]:
        start = time.perf_counter()
        try:
            await self.attachment.move(Transfer(kind, grant, 0, piece.span))
        except TransferError as error:
            why = self.side.mover.why_no_device if error.end is End.DEVICE else ""
            return 0.0, f"{error}{': ' * bool(why)}{why}; `UCX_LOG_LEVEL=info` says more"
        except OSError as error:
            return 0.0, f"{error}; `UCX_LOG_LEVEL=info` says more"
        return time.perf_counter() - start, ""

    def _line(self, name: str, seconds: float, *, ok: bool) -> CheckLine:
        differs = "values differ: please report it, with this output and the version of UCX"
        speed = f"{self.side.nbytes / max(seconds, 1e-9) / 1e9:.1f} GB/s, values compared"
        return CheckLine(name, ok=ok, text=speed if ok else differs)

    async def all(self, check: Callable[[str, int], Awaitable[bool]]) -> list[CheckLine]:
        """Read and write each way; `check` asks the other side whether its memory has what was written."""
        made = list[CheckLine]()
        for seed, (here, piece, there, grant) in enumerate(self.ways(), 2):
            made.append(await self.read(here, piece, there, grant, 1))
            line, seconds = await self.write(here, piece, there, grant, seed)
            made.append(self._line(line.name, seconds, ok=await check(there, seed)) if line.ok else line)
            piece.put(numbers(self.side.nbytes, 1))
            await self._move(TransferKind.WRITE, piece, grant)  # as it was
        return made

    async def is_refused(self) -> CheckLine:
        """Read what was revoked."""
        (_, piece, there, grant), *_ = self.ways()
        ok, text = False, f"{there} was read: please report it"
        try:
            await self.attachment.move(Transfer(TransferKind.READ, grant, 0, piece.span))
        except TransferError as error:
            ok, text = error.end is End.REVOKED, f"{there}: {error}"
        except OSError as error:
            text = str(error)
        return CheckLine("revoked memory is refused", ok=ok, text=text)


# ---- both sides ------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def _side(nbytes: int, make: MakeMemory) -> AsyncGenerator[CheckedSide]:
    settings = msgspec.structs.replace(reread(), rdma=("ucx",))
    mover = NativeMover(ProcId(secrets.randbelow(ID_MAX) + 1), settings)
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(mover.run)
            side = CheckedSide(mover, nbytes, make)
            side.fill(1)
            yield side
            side.revoke()
            nursery.cancel_scope.cancel()
    finally:
        mover.close()


async def serve(address: str, tell: Tell, make: MakeMemory = on_device, nbytes: int = NBYTES) -> bool:
    """Be the side that is asked, once.

    Args:
        address: At which to listen.
        tell: Gets the lines of the report.
        make: Makes memory of a device.
        nbytes: How much of it.

    Returns:
        Whether all was as it must be here.

    Blocking: until the other side has come and gone; cancellable.
    """
    async with _side(nbytes, make) as side:
        for line in side.lines:
            tell(line)
        token = secrets.token_hex(16)
        (listener, *_) = await trio.open_tcp_listeners(0, host=address)
        async with listener:
            port = listener.socket.getsockname()[1]
            where = f"[{address}]" if ":" in address else address
            tell(f"\non the other machine: python -m trimesh.rdma --gpudirect {where}:{port}/{token}\n")
            while True:
                async with await listener.accept() as stream:
                    with suppress(ProtocolError, trio.EndOfChannel, trio.BrokenResourceError):
                        ok = await _answer(side, SignedLines(stream, token, ASKED), tell)
                        return ok and all(line.ok for line in side.lines)
                tell("a connection ended before the check did: was the token of this side given?")


async def _answer(side: CheckedSide, lines: SignedLines, tell: Tell) -> bool:
    ok = True
    while True:
        asked = await lines.take()
        match asked:
            case ["look"]:
                await lines.send([side.lines, side.reached])
            case ["has", str() as name, int() as seed]:
                await lines.send(side.has(name, seed))
            case ["move", theirs]:
                async with _moves(side, reached_of(theirs)) as moves:

                    async def check(name: str, seed: int) -> bool:
                        await lines.send(["has", name, seed])
                        return await lines.take() is True

                    made = await moves.all(check)
                for line in made:
                    tell(line)
                ok = ok and all(line.ok for line in made)
                await lines.send(["moved", made])
            case ["revoke"]:
                side.revoke()
                await lines.send(value=None)
            case ["bye"]:
                return ok
            case _:
                raise ProtocolError(f"the self-test knows no {asked!r:.100}")


@asynccontextmanager
async def _moves(side: CheckedSide, theirs: Reached) -> AsyncGenerator[CheckedMoves]:
    attachment = side.mover.attach(theirs.home)
    try:
        yield CheckedMoves(side, attachment, theirs)
    finally:
        attachment.close()


def reached_of(value: Any) -> Reached:
    """Return how the other side is reached, as it has said it.

    Raises:
        ProtocolError: It has said something else.
    """
    try:
        found = msgspec.convert(value, Reached)
    except msgspec.ValidationError as error:
        raise ProtocolError(f"the other side must say how it is reached: {error}") from error
    home, grants = found.home, [one for one in (found.device, found.host) if one is not None]
    words = (home.pid, home.ledger, home.port, *(n for one in grants for n in (one.place, one.generation)))
    longs = (home.epoch, home.host, home.started)
    if not all(0 <= n < 1 << 32 for n in words) or not all(0 <= n < 1 << 64 for n in longs):
        raise ProtocolError("a side must be named by numbers of 32 and of 64 bits")
    if len(home.address) not in (0, 4, 16) or any(len(one.secret) != len(bytes(16)) for one in grants):
        raise ProtocolError("a side must be named by an address, and grants by secrets of 16 bytes")
    if any(not 0 < len(one.exported) <= limits.EXPORT_BYTES_MAX for one in grants):
        raise ProtocolError(f"what adapters need must have at most {limits.EXPORT_BYTES_MAX} bytes")
    return found


async def ask(peer: str, tell: Tell, make: MakeMemory = on_device, nbytes: int = NBYTES) -> bool:
    """Be the side that asks.

    Args:
        peer: What the other side has printed: "ADDRESS:PORT/TOKEN".
        tell: Gets the lines of the report.
        make: Makes memory of a device.
        nbytes: How much of it, as the other side has.

    Returns:
        Whether all was as it must be, on both sides.

    Raises:
        ValueError: `peer` is something else.
    """
    where, slash, token = peer.rpartition("/")
    host, colon, port = where.rpartition(":")
    if not (slash and colon and token and port.isdigit()):
        raise ValueError(f"the peer must be ADDRESS:PORT/TOKEN, as the other side has printed it, got {peer!r}")
    said = list[CheckLine]()

    def note(*lines: CheckLine) -> None:
        for line in lines:
            tell(line)
        said.extend(lines)

    async with _side(nbytes, make) as side:
        tell("here:")
        note(*side.lines)
        try:
            with trio.fail_after(limits.SELF_TEST_SECONDS):
                async with await trio.open_tcp_stream(host.strip("[]"), int(port)) as stream:
                    await _ask(side, SignedLines(stream, token, ASKING), tell, note)
        except (OSError, ProtocolError, trio.EndOfChannel, trio.BrokenResourceError, trio.TooSlowError) as error:
            why = f"{peer}: {str(error) or type(error).__name__}; is `--serve` still running there?"
            note(CheckLine("peer", ok=False, text=why))
    bad = sum(not line.ok for line in said)
    tell(
        f"\n{len(said)} checks, {bad} not as they must be"
        if bad
        else f"\nall {len(said)} checks are ok: please report that, too"
    )
    return not bad


async def _ask(side: CheckedSide, lines: SignedLines, tell: Tell, note: Callable[..., None]) -> None:
    await lines.send(["look"])
    match await lines.take():
        case [looked, reached]:
            pass
        case other:
            raise ProtocolError(f"the other side must say what it has found, and how it is reached, got {other!r:.100}")
    tell("there:")
    note(*_lines(looked))
    async with _moves(side, reached_of(reached)) as moves:
        if not moves.ways():
            note(CheckLine("transfers", ok=False, text="no adapter reaches memory of both sides: see above"))
        else:
            tell("from here:")
            note(*await moves.all(partial(_check, lines)))
            tell("from there:")
            note(*await _have_moved(side, lines))
            await lines.send(["revoke"])
            await lines.take()
            note(await moves.is_refused())
    await lines.send(["bye"])


async def _check(lines: SignedLines, name: str, seed: int) -> bool:
    await lines.send(["has", name, seed])
    return await lines.take() is True


def _lines(value: Any) -> list[CheckLine]:
    try:
        return msgspec.convert(value, list[CheckLine])
    except msgspec.ValidationError as error:
        raise ProtocolError(f"the other side must say what has come of its checks: {error}") from error


async def _have_moved(side: CheckedSide, lines: SignedLines) -> list[CheckLine]:
    side.fill(1)
    await lines.send(["move", side.reached])
    while True:
        match await lines.take():
            case ["has", str() as name, int() as seed]:
                await lines.send(side.has(name, seed))
            case ["moved", made]:
                return _lines(made)
            case other:
                raise ProtocolError(f"the self-test knows no {other!r:.100}")
