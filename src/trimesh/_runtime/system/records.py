"""Records of one process, shared by its spawner and its owner: configuration, exit report, output.

Each is one msgpack array, a part of the records of `spawner/wire`. Those of agents of hosts are at the end.
"""

# Annotations are not texts here: msgspec would compile each of them in every new process.

from typing import Annotated, Final

from msgspec import Meta, Struct

from trimesh.config import Settings
from trimesh.errors import place_name
from trimesh.ids import ID_MAX
from trimesh.limits import DIRECT_ADDRESS_CHARS_MAX, DIRECT_ADDRESSES_MAX

Id = Annotated[int, Meta(ge=1, le=ID_MAX)]
Count = Annotated[int, Meta(ge=0, le=ID_MAX)]

ENTRY: Final = "trimesh._runtime.life.worker:main"
"""Default entry of a worker: `module:function(config, link, broker, lifelines) -> int`."""


class Record(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Base of every record: an array whose first item is the name of its type."""


class HostShare(Record, frozen=True, kw_only=True):
    """Share of one process in its host, as its placement has reserved it.

    Attributes:
        name: Name of its `Need`.
        gpus: UUIDs of its GPUs.
        gpu_part: Part of each of them that it has: 1.0, or less where it shares one.
        gpu_memory: Bytes that it may use on each of them; 0 if its need names none.
        cpus: CPUs that it is bound to; empty if its need names none.
        memory: Bytes of the host's memory; 0 if its need names none.
    """

    name: str
    gpus: tuple[str, ...] = ()
    gpu_part: float = 0.0
    gpu_memory: Count = 0
    cpus: tuple[Count, ...] = ()
    memory: Count = 0


class WorkerConfig(Record, frozen=True, kw_only=True):
    """Configuration of a worker, the argument of its `main`.

    Attributes:
        proc_id, parent_id, root_id: Ids of the worker, of the process that requested it, and of the controller.
        mesh: Name of the process mesh.
        labels, sizes, rank: Extent of the mesh as spawned, and the place in it.
        incarnation: 0 for the first process at this point, one more for each restart.
        seed: Seed of the mesh; generators are seeded from (seed, mesh, rank, incarnation).
        grace: Seconds for clean-up; may be infinite.
        pickled: Whether values are pickled in its family.
        settings: Settings of the requesting process, overridden by `env=`.
        extra: Opaque bytes of packages above.
        is_far: Whether the requester is on another host.
        record: Folder of the flight records of its run; empty for none.
        share: Its share of the host; None outside of placements.
    """

    proc_id: Id
    parent_id: Id
    root_id: Id
    mesh: str
    labels: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()
    rank: Count = 0
    incarnation: Count = 0
    seed: int = 0
    grace: float = 0.0
    pickled: bool = True
    settings: Settings = Settings()
    extra: bytes = b""
    is_far: bool = False
    record: str = ""
    share: HostShare | None = None


class LostHost(Record, frozen=True):
    """The host that was lost with a process; see `peers/deaths.HostLoss`.

    Attributes:
        host: Name of the machine.
        reason, text: Why it is lost, as a word and as a sentence.
        hosts, rank: Number of the hosts of its job, and its place among them; 0 hosts without a job.
    """

    host: str
    reason: str
    text: str
    hosts: Count = 0
    rank: Count = 0


class OutputChunk(Record, frozen=True):
    """Lines of one stream of one worker, in order.

    Attributes:
        member: Name and coordinates, as shown.
        stream: 1 for standard output, 2 for standard error.
        dropped: Lines lost before the first one here, because the reader was slow.
        lines: Without their newlines.
    """

    member: str
    stream: Annotated[int, Meta(ge=1, le=2)]
    dropped: Count
    lines: tuple[bytes, ...]


def member_name(config: WorkerConfig) -> str:
    """Return mesh and coordinates as shown: `trainers[hosts=0,gpus=2]`, or `trainers` for one process.

    The last label varies fastest: rank 5 of hosts=2, gpus=4 is hosts=1, gpus=1.
    """
    rest, places = config.rank, list[tuple[str, int]]()
    for label, size in zip(reversed(config.labels), reversed(config.sizes), strict=False):
        places.append((label, rest % max(size, 1)))
        rest //= max(size, 1)
    return place_name(config.mesh, dict(reversed(places)))


# ---- between a controller and the agents of its hosts ----------------------------------------------------
#
# A process of host A requests a link to one on host B:
#
#     agent A -> controller   ForeignConnect
#     controller -> agent B   Connect, with `agent` and `answers`
#     agent B -> controller   ConnectedDirect
#     agent B -> agent A      Connected, on a channel of the session between the two
#     controller -> agent A   Arriving; if agent B or the session is lost, agent A answers the question itself
#
# Listening, Tunnel, Relayed and Parted arrange the session of the two, all through the controller.

Address = Annotated[str, Meta(max_length=DIRECT_ADDRESS_CHARS_MAX)]
Addresses = Annotated[tuple[Address, ...], Meta(max_length=DIRECT_ADDRESSES_MAX)]


class AgentReady(Record, frozen=True, tag=True):
    """From an agent, in place of `Ready`: workers can be launched on its host.

    Attributes:
        host: Name of the machine, from its own kernel.
    """

    host: str
    pid: Id


class ConnectedDirect(Record, frozen=True, tag=True):
    """From an agent, in place of `Connected`: the end has gone to the other agent, over the session of the two."""

    request: Id


class Arriving(Record, frozen=True, tag=True):
    """To an agent: the answer to its question arrives, or has arrived, from another agent over their session."""

    request: Id
    agent: Id


class Listening(Record, frozen=True, tag=True):
    """Addresses at which one of two agents listens. From that agent to the controller, then to the one that dials.

    Attributes:
        agent: The other agent, as seen by the sender or receiver of this record.
        addresses: `host:port`, in order; none if no address may be disclosed to the other one.
    """

    agent: Id
    addresses: Addresses


class Tunnel(Record, frozen=True, tag=True):
    """Connection of two agents through the controller. From the agent that dials, then to the other one.

    Descriptor: a stream socket, which carries the TLS of the two.
    """

    agent: Id


class Relayed(Record, frozen=True, tag=True):
    """From an agent that dials: no address of the other one answers, so their messages go through a `Tunnel`."""

    agent: Id
    text: str


class CastFeed(Record, frozen=True, tag=True):
    """One agent to another: the bodies of a cast, on this channel; see `hosts/casts`.

    Attributes:
        number: Number of the cast at the host that is fed.
    """

    number: Id


class Parted(Record, frozen=True, tag=True):
    """Two agents have no session any more: one of the two has lost it, or, to an agent, its host is lost.

    Attributes:
        agent: The other agent.
    """

    agent: Id
    is_lost: bool = True
