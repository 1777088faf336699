"""`RowBatch`: some rows of a stream, on a mesh."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from trimesh.tensor import MeshTensor


class RowBatch(Mapping[str, MeshTensor]):
    """Some rows, by column: a mapping of names to global tensors.

    Attributes:
        rows: How many; the last batch of an epoch may have fewer than the others.
        epoch: From 0.
        first_row: Number of its first row in the epoch.
    """

    def __init__(self, tensors: Mapping[str, MeshTensor], rows: int, epoch: int, first_row: int) -> None:
        self._tensors = tensors
        self.rows = rows
        self.epoch = epoch
        self.first_row = first_row

    def __getitem__(self, name: str) -> MeshTensor:
        """Return a column: its first dimension are the rows."""
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        """Return the names of the columns."""
        return iter(self._tensors)

    def __len__(self) -> int:
        """Return how many columns there are."""
        return len(self._tensors)

    def __repr__(self) -> str:
        return f"<batch of {self.rows} rows from {self.first_row} on of epoch {self.epoch}: {', '.join(self._tensors)}>"
