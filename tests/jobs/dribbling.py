"""Strangers at a port: they begin a handshake, a byte a second, and come again when they are thrown out.

dribbling.py PORT COUNT    says "all are there" when each has connected once; ends with its standard input
"""

from __future__ import annotations

import sys

import trio

RECORD = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"
"""The beginning of a client's first record."""


async def stranger(port: int, left: list[int]) -> None:
    """Connect again and again."""
    is_first = True
    while True:
        async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
            if is_first:
                is_first, left[0] = False, left[0] - 1
                if left[0] == 0:
                    print("all are there", flush=True)
            try:
                for byte in RECORD:
                    await stream.send_all(bytes([byte]))
                    with trio.move_on_after(1):
                        await stream.receive_some()
                        break
            except trio.BrokenResourceError:
                pass
        await trio.sleep(1)


async def main(port: int, count: int) -> None:
    """Be so many."""
    left = [count]
    async with trio.open_nursery() as nursery:
        for _ in range(count):
            nursery.start_soon(stranger, port, left)
        await trio.to_thread.run_sync(sys.stdin.read)
        nursery.cancel_scope.cancel()


if __name__ == "__main__":
    trio.run(main, int(sys.argv[1]), int(sys.argv[2]))
