"""The queue of a pool: bounded in number and bytes; by priority, then first come, first served."""

from __future__ import annotations

import heapq

from trimesh.service.dispatch.request import PoolRequest


class RequestQueue:
    """Requests that wait. Those that must go to one replica wait beside the others, in the same order.

    Args:
        count_max: Requests that may wait.
        bytes_max: Bytes that they may have; one request above it is let in when nothing else waits.
    """

    def __init__(self, count_max: int, bytes_max: int) -> None:
        self.count_max = count_max
        self.bytes_max = bytes_max
        self.count = 0
        self.bytes = 0
        self._heaps: dict[int | None, list[tuple[tuple[int, int], PoolRequest]]] = {}

    def has_room(self, size: int) -> bool:
        """Whether a request of so many bytes may come in."""
        return self.count < self.count_max and (self.count == 0 or self.bytes + size <= self.bytes_max)

    def put(self, request: PoolRequest) -> None:
        """Take a request in; its `replica` says whether it must go to one."""
        request.state = "waiting"
        self.count += 1
        self.bytes += request.size
        heapq.heappush(self._heaps.setdefault(request.replica, []), (request.order, request))

    def remove(self, request: PoolRequest) -> None:
        """Take a request out that does not wait any more, wherever it stands."""
        assert request.state == "waiting"
        request.state = "new"
        self.count -= 1
        self.bytes -= request.size
        heap = self._heaps[request.replica]
        if heap[0][1] is request:
            heapq.heappop(heap)
        else:
            heap[:] = [one for one in heap if one[1] is not request]
            heapq.heapify(heap)
        if not heap:
            del self._heaps[request.replica]

    def first(self, pinned_to: int | None) -> PoolRequest | None:
        """Return the first one that must go to a replica; with None, of those that may go to any."""
        heap = self._heaps.get(pinned_to)
        return heap[0][1] if heap else None

    @property
    def has_pinned(self) -> bool:
        """Whether there are requests that must go to one replica."""
        return len(self._heaps) > (None in self._heaps)

    def pinned(self) -> list[int]:
        """Return the replicas that requests must go to."""
        return [replica for replica in self._heaps if replica is not None]

    def release(self, replica: int) -> None:
        """Let the requests that must go to a replica go to any."""
        for _, request in self._heaps.pop(replica, []):
            request.replica = None
            heapq.heappush(self._heaps.setdefault(None, []), (request.order, request))

    def all(self) -> list[PoolRequest]:
        """Return all requests, in their order."""
        return [request for heap in self._heaps.values() for _, request in sorted(heap, key=lambda one: one[0])]
