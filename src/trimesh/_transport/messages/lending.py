"""Bodies that came in shared memory: lent by the native library, given back when the last view is gone.

A view may end anywhere: in another thread, inside the garbage collector, when the interpreter ends. So its end only
puts a note into a queue; the task of the transport gives the memory back with its next flush.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Final

from trimesh._native import status
from trimesh._native.lib import Library
from trimesh._transport.messages.assembly import AssemblyError

_SIZE_MASK: Final = (1 << 40) - 1
"""Of the word that names a body in shared memory."""


class Lending:
    """All bodies that one bus has lent.

    Attributes:
        returned: Bodies whose last view is gone: link, word, memory, mapped bytes.
    """

    def __init__(self, library: Library, bus: Any) -> None:
        self.returned: Final[deque[tuple[int, int, Any, int]]] = deque()
        self._ffi = library.ffi
        self._lib = library.lib
        self._bus = bus
        self._closed = False
        self._body = library.ffi.new("tm_body *")

    def take(self, link: int, word: int) -> memoryview:
        """Return the memory of a body, writable and private.

        Raises:
            AssemblyError: The peer named memory that it must not name, or there is none here.
        """
        code = self._lib.tm_body_take(self._bus, link, word, self._body)
        if code == status.ERR_PEER:
            info = self._ffi.new("tm_link_info *")
            status.check(self._lib.tm_link_get_info(self._bus, link, info), "asking a link")
            raise AssemblyError(self._ffi.string(info.detail).decode().removeprefix("the peer sent "))
        status.check(code, "taking a body")
        memory, mapped = self._body.bytes, int(self._body.mapped)
        note = (link, word, memory, mapped)

        def gone(_: Any) -> None:
            self.returned.append(note)
            if self._closed:
                self.give_back()  # nothing else will

        # The view keeps the buffer, the buffer the owner, the owner calls when it goes.
        owner = self._ffi.gc(memory, gone)
        return memoryview(self._ffi.buffer(owner, word & _SIZE_MASK))

    def give_back(self) -> None:
        """Give back what is not looked at any more."""
        while self.returned:
            try:
                link, word, memory, mapped = self.returned.popleft()
            except IndexError:  # another thread was faster
                return
            status.check(self._lib.tm_body_give_back(self._bus, link, word, memory, mapped), "giving a body back")

    def close(self) -> None:
        """The bus is gone. What is still looked at is unmapped as soon as it is not."""
        self._closed = True
        self._bus = self._ffi.NULL
        self.give_back()
