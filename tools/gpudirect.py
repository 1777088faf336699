"""Self-test of GPUDirect RDMA: whether RDMA adapters of two machines reach the CUDA devices of both, step by step.

    python tools/gpudirect.py --serve ADDRESS      on the one machine, which prints the PEER for the other
    python tools/gpudirect.py PEER                 on the other

Both need trimesh, of the release that this file comes with, and a torch for CUDA. The exit status is 0 if all checks
passed, else 1. No mesh is made: each side has a mover of its own and describes to the other, in signed lines, how its
memory is reached. The side that serves answers requests; the other requests its checks, moves bytes, then has it move
bytes the other way.
"""

from __future__ import annotations

import argparse
import hashlib
import hmac
import importlib
import os
import random
import secrets
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, Final

import attrs
import msgspec
import trio

from trimesh import limits
from trimesh._transport.interface import (
    Attachment,
    End,
    Grant,
    MemoryKind,
    ProcessAddress,
    Right,
    Span,
    Transfer,
    TransferError,
    TransferKind,
)
from trimesh._transport.native.mover import NativeMover, adapter_name
from trimesh.config import reread
from trimesh.errors import ProtocolError
from trimesh.ids import ID_MAX, ProcId
from trimesh.rdma.memory.device import settle_writes
from trimesh.rdma.memory.local import address_of

ADAPTERS = "/sys/class/infiniband"
NBYTES: Final = 64 << 20
LINE_BYTES_MAX: Final = 1 << 16  # two handles for adapters, a dozen texts
SECONDS_MAX: Final = 300.0  # a dozen transfers of 64 MiB each way take seconds, unless something hangs

CLIENT, SERVER = "asking", "asked"
_SIGNATURE_CHARS: Final = 64
_BOTH: Final = Right.READ | Right.WRITE

Tell = Callable[[object], None]


class Check(msgspec.Struct, frozen=True, array_like=True):
    """Result of one check.

    Attributes:
        name: What was checked.
        ok: Whether it passed.
        text: What was found; or the reason why not, and what to do.
    """

    name: str
    ok: bool
    text: str

    def __str__(self) -> str:
        return f"  {'ok' if self.ok else 'NO':<4}{self.name}: {self.text}"


# ---- signed lines ----------------------------------------------------------------------------------------------------


class SignedLines:
    """One side of a connection whose lines of JSON are signed with a token that the user carries to the other side.

    A side takes nothing from a process that does not know the token. Nothing is kept secret from those who listen.
    A signature covers the side and the number of the line, so that no line counts twice or as one of the other side.
    """

    def __init__(self, stream: trio.SocketStream, token: str, side: str) -> None:
        self._stream = stream
        self._token = token.encode()
        self._side = side
        self._other = SERVER if side == CLIENT else CLIENT
        self._sent = 0
        self._taken = 0
        self._rest = bytearray()

    def _sign(self, side: str, number: int, text: bytes) -> bytes:
        return hmac.new(self._token, f"{side} {number} ".encode() + text, hashlib.sha256).hexdigest().encode()

    async def send(self, value: Any) -> None:
        text = msgspec.json.encode(value)
        await self._stream.send_all(self._sign(self._side, self._sent, text) + text + b"\n")
        self._sent += 1

    async def take(self) -> Any:
        """Return the next value from the other side.

        Raises:
            ProtocolError: The line is not signed with the token, is too long, or no JSON.
            trio.EndOfChannel: The connection has ended.
        """
        while b"\n" not in self._rest:
            if len(self._rest) > LINE_BYTES_MAX:
                raise ProtocolError(f"a line must have at most {LINE_BYTES_MAX} bytes")
            data = await self._stream.receive_some(LINE_BYTES_MAX)
            if not data:
                raise trio.EndOfChannel
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        signature, text = bytes(line[:_SIGNATURE_CHARS]), bytes(line[_SIGNATURE_CHARS:])
        if not hmac.compare_digest(signature, self._sign(self._other, self._taken, text)):
            raise ProtocolError("a line must be signed with the token that the other side has printed")
        self._taken += 1
        try:
            return msgspec.json.decode(text)
        except msgspec.DecodeError as error:
            raise ProtocolError(f"a line must be JSON: {error}") from error


# ---- one side: its UCX, its device, its memory that adapters reach ---------------------------------------------------


@attrs.frozen
class HostMemory:
    """Memory of the host."""

    memory: bytearray
    kind: MemoryKind = MemoryKind.HOST

    @property
    def span(self) -> Span:
        return Span(address_of(memoryview(self.memory)), len(self.memory), self.memory, self.kind)

    def put(self, data: bytes) -> None:
        self.memory[:] = data

    def get(self) -> bytes:
        return bytes(self.memory)

    def settle(self) -> None:
        """Do nothing: adapters and the processor agree."""


@attrs.frozen
class DeviceMemory:
    """Memory of the first CUDA device that torch sees."""

    torch: Any
    tensor: Any

    @property
    def span(self) -> Span:
        return Span(self.tensor.data_ptr(), self.tensor.numel(), self.tensor, MemoryKind.CUDA)

    def put(self, data: bytes) -> None:
        self.tensor.copy_(self.torch.frombuffer(bytearray(data), dtype=self.torch.uint8))
        self.torch.cuda.synchronize()

    def get(self) -> bytes:
        return bytes(self.tensor.cpu().numpy())

    def settle(self) -> None:
        """Have the driver flush what adapters have written."""
        settle_writes(self.tensor.device.index)


Memory = HostMemory | DeviceMemory
MakeMemory = Callable[[int], tuple[Memory | None, str]]


def on_device(nbytes: int) -> tuple[Memory | None, str]:
    """Return memory of a device, and its name; or None, and why there is none, and what to do."""
    try:
        torch = importlib.import_module("torch")
    except ImportError as error:
        return None, f"torch cannot be imported ({error}): install a torch for CUDA"
    try:
        if not torch.cuda.is_available():
            return None, "torch sees no CUDA device: look at `nvidia-smi`, CUDA_VISIBLE_DEVICES, and torch.version.cuda"
        tensor = torch.zeros(nbytes, dtype=torch.uint8, device="cuda:0")
        return DeviceMemory(torch, tensor), str(torch.cuda.get_device_name(0))
    except (RuntimeError, AssertionError) as error:
        return None, f"CUDA does not start: {error}"


class Reached(msgspec.Struct, frozen=True):
    """How one side reaches the other.

    Attributes:
        home: The process.
        device, host: Its memory; None if no adapter reaches it.
    """

    home: ProcessAddress
    device: Grant | None
    host: Grant | None


class Side:
    """This process, as one of the two sides.

    Attributes:
        checks: Of its UCX, device and memory.
        device, host: Its memory; None if there is no device.
        reached: How the other side reaches it.
    """

    def __init__(self, mover: NativeMover, nbytes: int, make: MakeMemory) -> None:
        self.mover = mover
        self.nbytes = nbytes
        self.checks = list[Check]()
        self.host = HostMemory(bytearray(nbytes))
        self._check_ucx()
        self.device, text = make(nbytes)
        self._note("CUDA device", text, ok=self.device is not None)
        self.granted = {"host": self._grant("host memory", self.host)}
        if self.device is not None:
            self.granted["device"] = self._grant("device memory", self.device)
        self.reached = Reached(mover.home, self.granted.get("device"), self.granted["host"])

    def _note(self, name: str, text: str, *, ok: bool) -> None:
        self.checks.append(Check(name, ok=ok, text=text))

    def _check_ucx(self) -> None:
        try:
            adapters = ", ".join(sorted(os.listdir(ADAPTERS)))
        except OSError:
            adapters = ""
        text = adapters or f"none in {ADAPTERS}: is there one, and its kernel module loaded (`ibv_devices`)?"
        about = self.mover.adapters.about
        self._note("adapters", text, ok=bool(adapters))
        advice = "" if self.mover.has_adapters else ". Install the UCX of HPC-X or DOCA, and name it by TRIMESH_UCX"
        self._note("libucp", about + advice, ok=self.mover.has_adapters)
        if not self.mover.has_adapters:
            return
        name = adapter_name(about)
        is_verbs = name in ("ibverbs", "efa")
        advice = "" if is_verbs else ": this UCX has no transport for verbs; see UCX_TLS, and `ucx_info -d`"
        self._note("verbs in UCX", name + advice, ok=is_verbs)
        knows = self.mover.adapters.knows_devices
        self._note("CUDA in UCX", "ucp_context_query names its memory" if knows else self.mover.why_no_device, ok=knows)

    def _grant(self, name: str, piece: Memory) -> Grant | None:
        granted = self.mover.grant(piece.span, _BOTH)
        if granted.exported:
            self._note(f"{name} registered", f"{self.nbytes >> 20} MiB", ok=True)
            return granted
        is_device = piece.span.kind is MemoryKind.CUDA
        why = self.mover.why_no_device if is_device else self.mover.adapters.about
        self._note(f"{name} registered", why or "the adapter refuses it: see `ulimit -l`", ok=False)
        self.mover.revoke(granted)
        self.mover.drop(granted)
        return None

    def pieces(self) -> dict[str, Memory]:
        """Return its memory that adapters reach, by name."""
        made: dict[str, Memory | None] = {"device": self.device, "host": self.host}
        return {name: piece for name, piece in made.items() if piece is not None and self.granted.get(name) is not None}

    def fill(self, seed: int) -> None:
        for piece in self.pieces().values():
            piece.put(numbers(self.nbytes, seed))

    def has(self, name: str, seed: int) -> bool:
        """Return whether some of its memory has these numbers, as work queued on the device from now on sees it."""
        piece = self.pieces().get(name)
        return piece is not None and piece.get() == numbers(self.nbytes, seed)

    def revoke(self) -> None:
        for granted in self.granted.values():
            if granted is not None:
                self.mover.revoke(granted)


def numbers(nbytes: int, seed: int) -> bytes:
    """Return bytes that no mistake makes."""
    return random.Random(seed).randbytes(nbytes)  # noqa: S311 - no secret


@asynccontextmanager
async def _open_side(nbytes: int, make: MakeMemory) -> AsyncGenerator[Side]:
    settings = msgspec.structs.replace(reread(), rdma=("ucx",))
    mover = NativeMover(ProcId(secrets.randbelow(ID_MAX) + 1), settings)
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(mover.run)
            side = Side(mover, nbytes, make)
            side.fill(1)
            yield side
            side.revoke()
            nursery.cancel_scope.cancel()
    finally:
        mover.close()


# ---- transfers -------------------------------------------------------------------------------------------------------


@attrs.frozen
class Moves:
    """Transfers of one side with the memory of the other one."""

    side: Side
    attachment: Attachment
    theirs: Reached

    def ways(self) -> list[tuple[str, Memory, str, Grant]]:
        """Return each pair of memory here and there, with names."""
        granted = {"device": self.theirs.device, "host": self.theirs.host}
        return [
            (here, piece, there, grant)
            for here, piece in self.side.pieces().items()
            for there, grant in granted.items()
            if grant is not None
        ]

    async def read(self, here: str, piece: Memory, there: str, grant: Grant, seed: int) -> Check:
        name = f"read {there} there to {here} here"
        piece.put(bytes(self.side.nbytes))
        seconds, why = await self._move(TransferKind.READ, piece, grant)
        if why:
            return Check(name, ok=False, text=why)
        try:
            piece.settle()
        except RuntimeError as error:
            return Check(name, ok=False, text=f"{error}; buffers go through pinned memory then")
        return self._compared(name, seconds, ok=piece.get() == numbers(self.side.nbytes, seed))

    async def write(self, here: str, piece: Memory, there: str, grant: Grant, seed: int) -> tuple[Check, float]:
        """Write; the other side compares."""
        piece.put(numbers(self.side.nbytes, seed))
        seconds, why = await self._move(TransferKind.WRITE, piece, grant)
        # A read pushes what was written before (AD-2 of rdma/memory/device_transfer).
        why = why or (await self._move(TransferKind.READ, HostMemory(bytearray(1)), grant))[1]
        return Check(f"write {here} here to {there} there", ok=not why, text=why), seconds

    async def _move(self, kind: TransferKind, piece: Memory, grant: Grant) -> tuple[float, str]:
        start = time.perf_counter()
        try:
            await self.attachment.move(Transfer(kind, grant, 0, piece.span))
        except TransferError as error:
            why = self.side.mover.why_no_device if error.end is End.DEVICE else ""
            return 0.0, f"{error}{': ' * bool(why)}{why}; `UCX_LOG_LEVEL=info` says more"
        except OSError as error:
            return 0.0, f"{error}; `UCX_LOG_LEVEL=info` says more"
        return time.perf_counter() - start, ""

    def _compared(self, name: str, seconds: float, *, ok: bool) -> Check:
        differs = "values differ: please report it, with this output and the version of UCX"
        speed = f"{self.side.nbytes / max(seconds, 1e-9) / 1e9:.1f} GB/s, values compared"
        return Check(name, ok=ok, text=speed if ok else differs)

    async def all(self, has: Callable[[str, int], Awaitable[bool]]) -> list[Check]:
        """Read and write each way; `has` asks the other side whether its memory has what was written."""
        made = list[Check]()
        for seed, (here, piece, there, grant) in enumerate(self.ways(), 2):
            made.append(await self.read(here, piece, there, grant, 1))
            check, seconds = await self.write(here, piece, there, grant, seed)
            made.append(self._compared(check.name, seconds, ok=await has(there, seed)) if check.ok else check)
            piece.put(numbers(self.side.nbytes, 1))
            await self._move(TransferKind.WRITE, piece, grant)  # as it was
        return made

    async def is_refused(self) -> Check:
        """Read what was revoked."""
        (_, piece, there, grant), *_ = self.ways()
        ok, text = False, f"{there} was read: please report it"
        try:
            await self.attachment.move(Transfer(TransferKind.READ, grant, 0, piece.span))
        except TransferError as error:
            ok, text = error.end is End.REVOKED, f"{there}: {error}"
        except OSError as error:
            text = str(error)
        return Check("revoked memory is refused", ok=ok, text=text)


@asynccontextmanager
async def _attach(side: Side, theirs: Reached) -> AsyncGenerator[Moves]:
    attachment = side.mover.attach(theirs.home)
    try:
        yield Moves(side, attachment, theirs)
    finally:
        attachment.close()


def reached_of(value: Any) -> Reached:
    """Return how the other side is reached, from its own description.

    Raises:
        ProtocolError: It is no such description.
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


def _checks_of(value: Any) -> list[Check]:
    try:
        return msgspec.convert(value, list[Check])
    except msgspec.ValidationError as error:
        raise ProtocolError(f"the other side must say what has come of its checks: {error}") from error


async def _has_there(lines: SignedLines, name: str, seed: int) -> bool:
    await lines.send(["has", name, seed])
    return await lines.take() is True


# ---- the side that serves --------------------------------------------------------------------------------------------


async def serve(address: str, tell: Tell, make: MakeMemory = on_device, nbytes: int = NBYTES) -> bool:
    """Answer the requests of the other side, once.

    Args:
        address: At which to listen.
        tell: Gets the lines of the report.
        make: Makes memory of a device.
        nbytes: How much of it.

    Returns:
        Whether all checks passed here.
    """
    async with _open_side(nbytes, make) as side:
        for check in side.checks:
            tell(check)
        token = secrets.token_hex(16)
        (listener, *_) = await trio.open_tcp_listeners(0, host=address)
        async with listener:
            port = listener.socket.getsockname()[1]
            where = f"[{address}]" if ":" in address else address
            tell(f"\non the other machine: python tools/gpudirect.py {where}:{port}/{token}\n")
            while True:
                async with await listener.accept() as stream:
                    with suppress(ProtocolError, trio.EndOfChannel, trio.BrokenResourceError):
                        ok = await _answer(side, SignedLines(stream, token, SERVER), tell)
                        return ok and all(check.ok for check in side.checks)
                tell("a connection ended before the check did: was the token of this side given?")


async def _answer(side: Side, lines: SignedLines, tell: Tell) -> bool:
    ok = True
    while True:
        asked = await lines.take()
        match asked:
            case ["look"]:
                await lines.send([side.checks, side.reached])
            case ["has", str() as name, int() as seed]:
                await lines.send(side.has(name, seed))
            case ["move", theirs]:
                async with _attach(side, reached_of(theirs)) as moves:
                    made = await moves.all(partial(_has_there, lines))
                for check in made:
                    tell(check)
                ok = ok and all(check.ok for check in made)
                await lines.send(["moved", made])
            case ["revoke"]:
                side.revoke()
                await lines.send(value=None)
            case ["bye"]:
                return ok
            case _:
                raise ProtocolError(f"the self-test knows no {asked!r:.100}")


# ---- the side that requests ------------------------------------------------------------------------------------------


async def ask(peer: str, tell: Tell, make: MakeMemory = on_device, nbytes: int = NBYTES) -> bool:
    """Run the checks of both sides.

    Args:
        peer: What the other side has printed: "ADDRESS:PORT/TOKEN".
        tell: Gets the lines of the report.
        make: Makes memory of a device.
        nbytes: How much of it, as the other side has.

    Returns:
        Whether all checks passed, on both sides.

    Raises:
        ValueError: `peer` is something else.
    """
    where, slash, token = peer.rpartition("/")
    host, colon, port = where.rpartition(":")
    if not (slash and colon and token and port.isdigit()):
        raise ValueError(f"the peer must be ADDRESS:PORT/TOKEN, as the other side has printed it, got {peer!r}")
    noted = list[Check]()

    def note(*checks: Check) -> None:
        for check in checks:
            tell(check)
        noted.extend(checks)

    async with _open_side(nbytes, make) as side:
        tell("here:")
        note(*side.checks)
        try:
            with trio.fail_after(SECONDS_MAX):
                async with await trio.open_tcp_stream(host.strip("[]"), int(port)) as stream:
                    await _ask(side, SignedLines(stream, token, CLIENT), tell, note)
        except (OSError, ProtocolError, trio.EndOfChannel, trio.BrokenResourceError, trio.TooSlowError) as error:
            why = f"{peer}: {str(error) or type(error).__name__}; is `--serve` still running there?"
            note(Check("peer", ok=False, text=why))
    bad = sum(not check.ok for check in noted)
    tell(
        f"\n{len(noted)} checks, {bad} not as they must be"
        if bad
        else f"\nall {len(noted)} checks are ok: please report that, too"
    )
    return not bad


async def _ask(side: Side, lines: SignedLines, tell: Tell, note: Callable[..., None]) -> None:
    await lines.send(["look"])
    match await lines.take():
        case [checks, reached]:
            pass
        case other:
            raise ProtocolError(f"the other side must say what it has found, and how it is reached, got {other!r:.100}")
    tell("there:")
    note(*_checks_of(checks))
    async with _attach(side, reached_of(reached)) as moves:
        if not moves.ways():
            note(Check("transfers", ok=False, text="no adapter reaches memory of both sides: see above"))
        else:
            tell("from here:")
            note(*await moves.all(partial(_has_there, lines)))
            tell("from there:")
            note(*await _have_moved(side, lines))
            await lines.send(["revoke"])
            await lines.take()
            note(await moves.is_refused())
    await lines.send(["bye"])


async def _have_moved(side: Side, lines: SignedLines) -> list[Check]:
    side.fill(1)
    await lines.send(["move", side.reached])
    while True:
        match await lines.take():
            case ["has", str() as name, int() as seed]:
                await lines.send(side.has(name, seed))
            case ["moved", made]:
                return _checks_of(made)
            case other:
                raise ProtocolError(f"the self-test knows no {other!r:.100}")


# ---- main ------------------------------------------------------------------------------------------------------------


def main() -> int:
    """Run the side that the command line names; return the exit status."""
    parser = argparse.ArgumentParser("python tools/gpudirect.py", description="Self-test of GPUDirect RDMA.")
    parser.add_argument("peer", nargs="?", metavar="PEER", help="what the other machine has printed")
    parser.add_argument("--serve", metavar="ADDRESS", help="listen there, and print PEER for the other machine")
    options = parser.parse_args()
    if bool(options.peer) == bool(options.serve):
        parser.error("give the PEER that the other machine has printed, or --serve ADDRESS to print one")
    tell = partial(print, flush=True)
    try:
        run = partial(serve, options.serve, tell) if options.serve else partial(ask, options.peer, tell)
        return 0 if trio.run(run) else 1
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    sys.exit(main())
