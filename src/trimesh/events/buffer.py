"""What one reader of events has not read yet: bounded, with a count in place of what was lost."""

from __future__ import annotations

from collections import deque

from trimesh.events.records import Event, Lagged


class EventBuffer:
    """The newest records for one reader.

    When it is full the oldest record goes: a reader that is behind wants to know how things are now.

    Attributes:
        records_max: How many are kept.
        lost: How many were lost since the reader last took one.
    """

    def __init__(self, records_max: int) -> None:
        self.records_max = records_max
        self.lost = 0
        self._records: deque[Event] = deque()

    def put(self, event: Event) -> None:
        """Add the newest record."""
        if len(self._records) >= self.records_max:
            self._records.popleft()
            self.lost += 1
        self._records.append(event)

    def take(self) -> Event | None:
        """Return the oldest record, `Lagged` in place of those that were lost, or None when there is none."""
        if self.lost:
            lagged, self.lost = Lagged(self.lost), 0
            return lagged
        return self._records.popleft() if self._records else None

    def __len__(self) -> int:
        return len(self._records) + (1 if self.lost else 0)
