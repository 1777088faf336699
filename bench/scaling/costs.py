"""What a cast costs the processes that take part, in microseconds of one core, as measured on one machine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Costs:
    """The parameters of the model; all in microseconds but for those that name another unit.

    Attributes:
        call: The caller's, once a call: binding, encoding, the task's switches, the result.
        send: The caller's, for each rank: credits, a frame into its ring, its bell.
        take: The caller's, for each reply: its frame, the collector, decoding.
        work: A rank's own share, caches warm: its wake, decoding, the endpoint, the reply.
        work_cold: The same when others have used the caches since.
        warm_ranks: Ranks of one machine whose caches stay warm.
        relay: A host leader's, once a cast, besides `send` and `take` of those below: a call taken, two made.
        hop: From one process of a host to another, less what both compute.
        tcp_hop: The same between hosts: over a stream socket and two native threads.
        tcp_send, tcp_take: What a rank or leader on another host costs its caller more than one on this host.
        byte: Each byte of a pickled list of replies, encoded on one side and decoded on the other.
        copy: Each byte of a large argument, copied once for all ranks of one host.
        tcp_copy: Each byte of a large argument that a stream socket carries, for each receiver.
    """

    call: float
    send: float
    take: float
    work: float
    work_cold: float
    warm_ranks: float
    relay: float
    hop: float
    tcp_hop: float
    tcp_send: float
    tcp_take: float
    byte: float
    copy: float
    tcp_copy: float

    def work_of(self, ranks: int) -> float:
        """Return what a rank computes where so many share one machine's caches.

        Caches that hold `warm_ranks` keep that part of what `ranks` of them use; the rest comes from memory.
        """
        missed = max(0.0, 1.0 - self.warm_ranks / ranks)
        return self.work + (self.work_cold - self.work) * missed
