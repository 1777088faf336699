"""The blocks of one process that are being left."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING

import trio

from trimesh import limits
from trimesh.context_managers import contextmanager

if TYPE_CHECKING:
    from trimesh._runtime.meshes.block import Block


class StoppingBlocks:
    """Iterates over the blocks that are being left, in the order in which that has begun."""

    def __init__(self) -> None:
        self._blocks: list[Block] = []
        self._left_at = -math.inf
        self._left = trio.Event()

    def __iter__(self) -> Iterator[Block]:
        return iter(self._blocks)

    @contextmanager
    def holding(self, block: Block) -> Generator[None, None, None]:
        """Count `block` among them."""
        self._blocks.append(block)
        try:
            yield
        finally:
            self._blocks.remove(block)
            self._left_at = trio.current_time()
            self._left.set()
            self._left = trio.Event()

    @property
    def is_quiet(self) -> bool:
        """Whether no block is being left, nor was in the last `limits.LEAVING_SECONDS`."""
        return not self._blocks and trio.current_time() >= self._left_at + limits.LEAVING_SECONDS

    async def wait_quiet(self) -> None:
        """Wait until no block has been left for `limits.LEAVING_SECONDS`. No checkpoint when that is so."""
        while not self.is_quiet:
            if self._blocks:
                await self._left.wait()
            else:
                await trio.sleep_until(self._left_at + limits.LEAVING_SECONDS)
