"""A mover as the tests see it, and the other process of the tests.

`python -m tests.native.mover EPOCH CARRIERS HOST ADDRESS` makes a mover and obeys calls that come as lines of JSON on
standard input: the name of a method of `Mover` and its arguments; each is answered by a line. It ends when standard
input does.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import resource
import secrets
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

import attrs
import numpy as np
from tests.native import sandbox

from trimesh import limits
from trimesh._native.lib import load

HOST = 77
LOCAL, SHM, CMA, TCP, UCX = 1, 2, 4, 8, 16
ALL = 31
HOST_MEMORY, CUDA_MEMORY = 0, 1
READ, WRITE, ADD, SWAP = 1, 2, 3, 4
RIGHTS = 3
WAIT_SECONDS = 60.0
"""A hang guard: nothing that is waited for here takes this long."""

native = load()
lib, ffi = native.lib, native.ffi


def check(status: int) -> int:
    """Return a status that is no error."""
    assert status >= 0, status
    return status


@attrs.frozen
class Grant:
    """What names a grant, and where its memory is in the process that granted it."""

    place: int
    generation: int
    secret: str
    size: int = 0
    address: int = 0
    exported: str = ""

    def name(self) -> Any:
        """Return the C struct."""
        return ffi.new("tm_grant *", (self.place, self.generation, (bytes.fromhex(self.secret),)))


@attrs.frozen
class Done:
    """How a transfer has ended."""

    id: int
    status: int
    carrier: int
    value: int


class Mover:
    """The functions of the header, with Python's values."""

    def __init__(self, epoch: int, carriers: int = ALL, *, host: int = HOST, address: bytes = b"") -> None:
        out = ffi.new("tm_mover **")
        options = (epoch, host, carriers, len(address), address.ljust(16, b"\0"))
        check(lib.tm_mover_create(ffi.new("tm_mover_options *", options), out))
        self.handle = out[0]
        self.memory: dict[int, Any] = {}
        self.blocks: dict[int, int] = {}
        self.grants: list[dict[str, Any]] = []
        self.records: dict[int, Done] = {}
        self.pinned: dict[int, Any] = {}
        self.seen: Any = None

    def clean(self) -> None:
        """Give back what `grant` has made."""
        for grant in self.grants:
            if self.revoke(grant) >= 0:
                self.drop(grant)
        for number in filter(None, self.blocks.values()):
            self.give_back(number)
        for one in (self.grants, self.blocks, self.memory):
            one.clear()

    def close(self) -> None:
        """Give back what it has, and destroy it."""
        if self.handle is not None:
            self.clean()
            check(lib.tm_mover_destroy(self.handle))
            self.handle = None

    def home(self) -> list[Any]:
        """Return how this process is reached, as plain values."""
        home = ffi.new("tm_home *")
        check(lib.tm_mover_home(self.handle, home))
        fields = [home.epoch, home.host, home.started, home.pid, home.ledger, home.port, home.address_size]
        return [*fields, bytes(home.address).hex()]

    # ---- granting ----

    def grant(
        self, size: int, *, block: bool = False, rights: int = RIGHTS, seed: int = 0, memory: int = HOST_MEMORY
    ) -> dict[str, Any]:
        """Make memory with a pattern in it and grant access to it; `memory` is what it is said to be."""
        number = 0
        if block:
            number, address, room = self.take_block(size)
            made = ffi.buffer(ffi.cast("uint8_t *", address), room)
        else:
            made = mmap.mmap(-1, size)
            address = int(ffi.cast("uintptr_t", ffi.from_buffer(made)))
        made[:size] = pattern(size, seed)
        granted = self.grant_at(address, size, rights=rights, block=number, memory=memory)
        self.memory[address] = made
        self.blocks[address] = number
        return granted

    def grant_at(
        self, address: int, size: int, *, rights: int = RIGHTS, block: int = 0, memory: int = HOST_MEMORY
    ) -> dict[str, Any]:
        """Grant access to memory that is there."""
        name = ffi.new("tm_grant *")
        secret = secrets.token_bytes(16)
        name.secret.bytes = secret
        status = lib.tm_grant_add(self.handle, ffi.cast("uint8_t *", address), size, rights, block, memory, name)
        check(status)
        grant = attrs.asdict(Grant(name.place, name.generation, secret.hex(), size, address))
        self.grants.append(grant)
        return grant

    def export(self, grant: dict[str, Any]) -> dict[str, Any]:
        """Return a grant with what readers with an adapter need."""
        out, size = ffi.new("uint8_t[]", limits.EXPORT_BYTES_MAX), ffi.new("uint32_t *")
        check(lib.tm_grant_export(self.handle, Grant(**grant).name(), out, len(out), size))
        return grant | {"exported": bytes(out)[: size[0]].hex()}

    def adapters(self) -> tuple[int, str]:
        """Return whether there are adapters that can be used, and which, or why not."""
        out = ffi.new("tm_adapters *")
        check(lib.tm_mover_get_adapters(self.handle, out))
        return out.usable, ffi.string(out.about).decode()

    def why_no_device(self) -> str:
        """Return why memory of devices is not reached."""
        out = ffi.new("tm_adapters *")
        check(lib.tm_mover_get_adapters(self.handle, out))
        return str(ffi.string(out.why_no_device).decode())

    def revoke(self, grant: dict[str, Any]) -> int:
        """Revoke, once."""
        return int(lib.tm_grant_revoke(self.handle, Grant(**grant).name()))

    def drop(self, grant: dict[str, Any]) -> int:
        """Forget a revoked grant."""
        return int(lib.tm_grant_drop(self.handle, Grant(**grant).name()))

    def take_block(self, size: int) -> tuple[int, int, int]:
        """Return number, address and size of a block."""
        out = ffi.new("tm_block *")
        check(lib.tm_block_take(self.handle, size, out))
        return out.number, int(ffi.cast("uintptr_t", out.bytes)), out.size

    def give_back(self, number: int) -> int:
        """Give a block back."""
        return int(lib.tm_block_give_back(self.handle, number))

    def number_of(self, grant: dict[str, Any]) -> int:
        """Return the number of the block of a grant made by `grant`."""
        return self.blocks[grant["address"]]

    def poke(self, address: int, data: str) -> None:
        """Write memory of this process."""
        raw = bytes.fromhex(data)
        ffi.memmove(ffi.cast("uint8_t *", address), raw, len(raw))

    def peek(self, address: int, size: int) -> str:
        """Read memory of this process."""
        return bytes(ffi.buffer(ffi.cast("uint8_t *", address), size)).hex()

    # ---- reaching ----

    def attach(self, home: list[Any]) -> int:
        """Attach to a process."""
        out = ffi.new("uint32_t *")
        check(lib.tm_attachment_open(self.handle, home_struct(home), out))
        return int(out[0])

    def detach(self, attachment: int) -> int:
        """End an attachment."""
        return int(lib.tm_attachment_close(self.handle, attachment))

    def info(self, attachment: int) -> tuple[int, int, str]:
        """Return carriers, gone and why not."""
        info = ffi.new("tm_attachment_info *")
        check(lib.tm_attachment_get_info(self.handle, attachment, info))
        return info.carriers, info.gone, ffi.string(info.why_not).decode()

    def begin(
        self,
        attachment: int,
        kind: int,
        grant: dict[str, Any],
        local: Any,
        *,
        offset: int = 0,
        size: int | None = None,
        operand: int = 0,
        expected: int = 0,
        carriers: int = ALL,
        memory: int = HOST_MEMORY,
    ) -> tuple[int, Done]:
        """Begin a transfer. `local` is writable memory, or None; `memory` is what it is said to be."""
        request = ffi.new("tm_transfer *")
        request.memory = memory
        request.attachment, request.kind, request.grant = attachment, kind, Grant(**grant).name()[0]
        request.offset, request.carriers = offset, carriers
        exported = ffi.from_buffer(bytes.fromhex(grant.get("exported", "")))
        if len(exported):
            request.exported, request.exported_size = exported, len(exported)
        request.operand, request.expected = operand, expected
        pinned = None
        if local is None:
            request.size = 8
        else:
            request.local = pinned = ffi.from_buffer("uint8_t[]", local)
            request.size = len(local) if size is None else size
        done = ffi.new("tm_done *")
        status = lib.tm_transfer_begin(self.handle, request, done)
        if status == lib.TM_UNDER_WAY:
            self.pinned[done.id] = pinned, exported
        return status, Done(done.id, done.status, done.carrier, done.value)

    def move(self, attachment: int, kind: int, grant: dict[str, Any], local: Any, **options: Any) -> Done:
        """Do a transfer to its end."""
        status, done = self.begin(attachment, kind, grant, local, **options)
        return self.wait(done.id) if status == lib.TM_UNDER_WAY else (check(status), done)[1]

    def poll(self) -> None:
        """Take the records that are there."""
        done, n = ffi.new("tm_done[8]"), ffi.new("uint32_t *")
        while True:
            check(lib.tm_mover_poll(self.handle, done, 8, n))
            for one in done[0 : n[0]]:
                self.records[one.id] = Done(one.id, one.status, one.carrier, one.value)
                del self.pinned[one.id]
            if n[0] < 8:
                return

    def wait(self, number: int) -> Done:
        """Wait for the record of a transfer."""
        while number not in self.records:
            ready, _, _ = select.select([lib.tm_mover_bell(self.handle)], [], [], WAIT_SECONDS)
            assert ready, f"no record of transfer {number:#x} came"
            self.poll()
        return self.records.pop(number)

    def give_up(self, number: int) -> int:
        """Have a transfer end soon."""
        return int(lib.tm_transfer_give_up(self.handle, number))

    def view(
        self, attachment: int, grant: dict[str, Any], *, offset: int = 0, size: int = 8, writable: bool = False
    ) -> tuple[int, Any, int]:
        """Open a view: status, its memory as a cffi buffer, its handle."""
        out = ffi.new("tm_view *")
        status = lib.tm_view_open(self.handle, attachment, Grant(**grant).name(), offset, size, writable, out)
        memory = ffi.buffer(out.bytes, size) if out.bytes != ffi.NULL else None
        return status, memory, out.handle

    def close_view(self, handle: int) -> int:
        """Close a view."""
        return int(lib.tm_view_close(self.handle, handle))

    # ---- as a reader that a test controls ----

    def hold(self, attachment: int, grant: dict[str, Any]) -> int:
        """Stay at a grant, by a view that is not closed."""
        status, self.seen, _ = self.view(attachment, grant, size=grant["size"])
        return status

    def held(self, size: int) -> str:
        """Return what is seen of the grant that was held last."""
        return bytes(self.seen)[:size].hex()

    def add(self, attachment: int, grant: dict[str, Any], operand: int, times: int, carriers: int = ALL) -> int:
        """Add many times; return how many went wrong."""
        wrong = 0
        for _ in range(times):
            wrong += self.move(attachment, ADD, grant, None, operand=operand, carriers=carriers).status != lib.TM_OK
        return wrong

    def fetch(self, attachment: int, grant: dict[str, Any]) -> tuple[int, bool]:
        """Read all of it; return the status and whether the pattern came."""
        local = bytearray(grant["size"])
        status = self.move(attachment, READ, grant, local).status
        return status, local == pattern(len(local))

    def read(self, attachment: int, grant: dict[str, Any], size: int, carriers: int = ALL) -> tuple[int, str]:
        """Read from the beginning; return the status and the bytes."""
        local = bytearray(size)
        done = self.move(attachment, READ, grant, local, carriers=carriers)
        return done.status, bytes(local).hex()

    def carrier_of(self, attachment: int, grant: dict[str, Any]) -> int:
        """Return what carries a read of all of it."""
        return self.move(attachment, READ, grant, bytearray(grant["size"])).carrier

    def enter_sandbox(self, *calls: str, error: int = errno.EPERM) -> None:
        """Have the kernel refuse system calls to this process from now on."""
        sandbox.refuse(*calls, error=error)

    def descriptors(self) -> int:
        """Return how many descriptors this process has."""
        return len(os.listdir("/proc/self/fd"))

    def limit_descriptors(self, count: int) -> None:
        """Let this process have so many descriptors at most."""
        resource.setrlimit(resource.RLIMIT_NOFILE, (count, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))

    def become_another(self) -> None:
        """Be the same process with another program, which says so."""
        os.execv(sys.executable, [sys.executable, "-S", "-c", "print('true', flush=True); input()"])


def home_struct(home: list[Any]) -> Any:
    """Return the C struct of plain values."""
    return ffi.new("tm_home *", (*home[:7], bytes.fromhex(home[7])))


def pattern(size: int, seed: int = 0) -> bytes:
    """Return bytes in which no two pieces are alike."""
    numbers = np.arange(seed, seed + (size + 7) // 8, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return numbers.tobytes()[:size]


class Other:
    """Another process with a mover, to be called like one."""

    def __init__(self, epoch: int, carriers: int = ALL, *, host: int = HOST, address: bytes = b"") -> None:
        arguments = [str(epoch), str(carriers), str(host), address.hex()]
        root = Path(__file__).parents[2]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.native.mover", *arguments],
            cwd=root,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.pid = self.process.pid

    def start(self, name: str, *arguments: Any, **options: Any) -> None:
        """Call a method, and do not wait for its end."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([name, arguments, options]).encode() + b"\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        """Wait for the end of what was started first."""
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], WAIT_SECONDS)
        assert ready, "the other process does not answer"
        line = self.process.stdout.readline()
        assert line, "the other process has ended"
        return json.loads(line)

    def call(self, name: str, *arguments: Any, **options: Any) -> Any:
        """Call a method."""
        self.start(name, *arguments, **options)
        return self.answer()

    def signal(self, number: int) -> None:
        """Send it a signal."""
        self.process.send_signal(number)

    def kill(self) -> None:
        """End it at once, and wait until it has ended."""
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        """End it, in whatever state it is."""
        self.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


def main() -> None:
    """Be the other process."""
    epoch, carriers, host, address = sys.argv[1:]
    mover = Mover(int(epoch), int(carriers), host=int(host), address=bytes.fromhex(address))
    for line in sys.stdin:
        name, arguments, options = json.loads(line)
        print(json.dumps(getattr(mover, name)(*arguments, **options)), flush=True)
    mover.close()


if __name__ == "__main__":
    main()
