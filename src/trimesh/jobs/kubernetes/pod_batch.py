"""Pods of one Job, as their launcher knows them: those of the beginning of a run, or such as come later."""

from __future__ import annotations

from collections.abc import Sequence

import trio

from trimesh.errors import SpawnError
from trimesh.jobs.kubernetes.cluster import ApiError


class PodBatch:
    """Pods that get their tokens at once: one change of the Secret, one look of each pod.

    Args:
        name: Of the Secret.
        ranks: Their places among the pods of the run.

    Attributes:
        made: Kinds and names of the objects that it has, or may have.
    """

    def __init__(self, name: str, ranks: Sequence[int]) -> None:
        self.name = name
        self.ranks = ranks
        self.made: list[tuple[str, str]] = []
        self._tokens: dict[int, str] = {}
        self._given = trio.Event()
        self._refused: ApiError | None = None

    def take(self, rank: int, token: str) -> dict[int, str] | None:
        """Keep the token of a pod; return those of all by their index, once they are there.

        Raises:
            SpawnError: The pod has had one; it is used up.
        """
        index = rank - self.ranks[0]
        if index in self._tokens:
            raise SpawnError("its pod has ended, and a pod has one token")
        self._tokens[index] = token
        return self._tokens if len(self._tokens) == len(self.ranks) else None

    def gave(self, refused: ApiError | None) -> None:
        """Learn that all have got their tokens, or why they have not."""
        self._refused = refused
        self._given.set()

    async def wait_given(self) -> None:
        """Wait until all have got their tokens.

        Raises:
            SpawnError: They cannot be given them.
        """
        await self._given.wait()
        if self._refused is not None:
            raise SpawnError(f"the pods of {self.name} cannot be given their tokens: {self._refused}")
