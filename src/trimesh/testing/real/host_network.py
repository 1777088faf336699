"""Hosts in network namespaces: a bridge, a virtual cable to each host, and faults of both.

    controller --+
    host 0 ------+-- bridge, in a namespace of its own; nft drops here, tc limits here
    host 1 ------+

NW-1 No fault outlives the block of `open_host_network`, and none reaches outside its namespaces.
NW-2 All faults in force at one moment are written atomically, as one table of rules.

NN-1 A namespace ends with its last descriptor and process, even if this process is killed.
"""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
import threading
from collections.abc import Generator, Iterable, Sequence
from contextlib import ExitStack, contextmanager
from typing import Final

import attrs
import trio

from trimesh.testing.plans.fault import Direction, Heal, checked_amount, once

CONTROLLER: Final = -1
"""Rank of the test's own process among the hosts."""

_TOOLS: Final = ("nsenter", "ip", "tc", "nft", "ss")
_SUBNET: Final = "198.51.100"
"""Addresses for documentation (RFC 5737), visible only in the namespaces."""

_HOSTS_MAX: Final = 200
_PER_MILLION: Final = 1_000_000
_BURST_BYTES: Final = 32 * 1024
_LATENCY: Final = "400ms"
"""Longest wait of a packet for a slow cable; then it is dropped, as by a switch."""


@functools.cache
def why_no_networks() -> str | None:
    """Return the reason why hosts in network namespaces are impossible here; None if they work."""
    missing = missing_tools(_TOOLS)
    if missing:
        return f"hosts in network namespaces need {', '.join(missing)} (util-linux, iproute2, nftables)"
    try:
        with open_host_network(1) as network:
            network.lose_packets([0], 0.01)()
    except (OSError, RuntimeError) as error:
        return f"hosts in network namespaces need root, veth, bridges and nftables of the kernel: {error}"
    return None


@attrs.frozen(eq=False)
class _Rule:
    """Drops frames between two sets of hosts, all or at random.

    Attributes:
        source, target: Ranks of the sets.
        probability: Probability of dropping each frame.
    """

    source: frozenset[int]
    target: frozenset[int]
    probability: float

    @property
    def text(self) -> str:
        """The rule in the syntax of nft."""
        chance = f"numgen random mod {_PER_MILLION} < {round(self.probability * _PER_MILLION)} "
        between = f"iifname {{ {_cables(self.source)} }} oifname {{ {_cables(self.target)} }}"
        return f"{between} {chance if self.probability < 1 else ''}counter drop"

    def parts(self, rank: int) -> bool:
        """Return whether it drops everything from the controller to a host, or back."""
        from_it = rank in self.source and CONTROLLER in self.target
        return self.probability == 1 and (from_it or (rank in self.target and CONTROLLER in self.source))


class HostNetwork:
    """Some hosts and the controller, each in a namespace of its own. Made by `open_host_network`.

    Faults add up, and last until the function that they return is called. Each call blocks for some milliseconds.

    Attributes:
        changed: Tasks that wait for the next change of rules.
    """

    def __init__(self, stack: ExitStack, count: int) -> None:
        if not 1 <= count <= _HOSTS_MAX:
            raise ValueError(f"a network has 1 to {_HOSTS_MAX} hosts, got {count!r}")
        self.changed = trio.lowlevel.ParkingLot()
        self._bridge = _new_namespace(stack)
        self._hosts = {rank: _new_namespace(stack) for rank in range(CONTROLLER, count)}
        self._rules = list[_Rule]()
        self._rates = dict[int, list[float]]()
        self._plug_in()

    def _plug_in(self) -> None:
        lines = ["link add name bridge type bridge mcast_snooping 0", "link set bridge up"]
        for rank, host in self._hosts.items():
            lines.append(f"link add name {_cable(rank)} type veth peer name eth0 netns {host.path}")
            lines.append(f"link set {_cable(rank)} master bridge up")
        self._bridge.run(["ip", "-batch", "-"], _text(lines))
        for rank, host in self._hosts.items():
            address = f"{self.address(rank)}/24"
            host.run(
                ["ip", "-batch", "-"], _text(["link set lo up", f"addr add {address} dev eth0", "link set eth0 up"])
            )
        self._write_rules()

    def __len__(self) -> int:
        """Return the number of hosts, without the controller."""
        return len(self._hosts) - 1

    def address(self, rank: int) -> str:
        """Return the IP address of a host or the controller."""
        return f"{_SUBNET}.{rank + 2}"

    def namespace(self, rank: int) -> NetNamespace:
        """Return the namespace of a host or the controller."""
        return self._hosts[rank]

    # ---- faults ----------------------------------------------------------------------------------------------

    def cut(self, ranks: Iterable[int], direction: Direction = "both") -> Heal:
        """Cut some hosts off from all others, the controller included; return a function that heals it.

        Args:
            ranks: Ranks of the hosts, which still reach each other.
            direction: "a_to_b" drops traffic to them, "b_to_a" traffic from them.
        """
        return self._add(self._between(ranks, direction, 1.0))

    def part(self, ranks: Iterable[int], others: Iterable[int]) -> Heal:
        """Cut some hosts off from some others, in both directions; return a function that heals it.

        Args:
            ranks: Ranks of hosts; `CONTROLLER` is allowed.
            others: Ranks of the others.
        """
        one, two = self._checked(ranks), self._checked(others)
        return self._add([_Rule(one - two, two - one, 1.0), _Rule(two - one, one - two, 1.0)])

    def connections(self, rank: int, other: int) -> int:
        """Return the number of TCP connections between two hosts."""
        command = ["ss", "-H", "-t", "state", "established", "dst", self.address(other)]
        return len(self._hosts[rank].run(command).splitlines())

    def listening(self, rank: int) -> int:
        """Return the number of addresses at which processes of a host listen for TCP."""
        return len(self._hosts[rank].run(["ss", "-H", "-t", "-l"]).splitlines())

    def lose_packets(self, ranks: Iterable[int], probability: float, direction: Direction = "both") -> Heal:
        """Drop packets between some hosts and all others with a probability; return a function that heals it."""
        return self._add(self._between(ranks, direction, checked_amount("a probability", probability, most=1)))

    def limit(self, ranks: Iterable[int], bits_per_second: float) -> Heal:
        """Limit the bandwidth of these hosts' cables in each direction; return a function that heals it."""
        rate = checked_amount("bits a second", bits_per_second)
        chosen = self._checked(ranks)
        for rank in chosen:
            self._rates.setdefault(rank, []).append(rate)
        self._write_rates(chosen)

        def heal() -> None:
            for rank in chosen:
                self._rates[rank].remove(rate)
            self._write_rates(chosen)

        return once(heal)

    def reset(self, ranks: Iterable[int]) -> int:
        """Break every TCP connection between these hosts and others, with a reset; return how many there were."""
        found = 0
        for rank in sorted(self._checked(ranks)):
            # ss reports each refusal of the kernel, as for a socket that is closed already, and goes on.
            killed = self._hosts[rank].run(["ss", "-H", "-K", "-t", "state", "established", "src", self.address(rank)])
            found += len(killed.splitlines())
        return found

    def is_cut(self, rank: int) -> bool:
        """Return whether a host and the controller are cut off from each other."""
        return any(rule.parts(rank) for rule in self._rules)

    async def wait_uncut(self, rank: int) -> None:
        """Wait until a host and the controller are not cut off from each other."""
        await trio.lowlevel.checkpoint()
        while self.is_cut(rank):
            await self.changed.park()

    def dropped(self) -> int:
        """Return the number of frames dropped by the rules in force."""
        text = self._bridge.run(["nft", "list", "chain", "bridge", "faults", "between"])
        words = text.split()
        return sum(int(words[at + 1]) for at, word in enumerate(words) if word == "packets")

    # ---- rules of nft and tc ---------------------------------------------------------------------------------

    def _checked(self, ranks: Iterable[int]) -> frozenset[int]:
        chosen = frozenset(ranks)
        if not chosen or not chosen <= self._hosts.keys():
            raise ValueError(
                f"ranks of hosts must be from {CONTROLLER} to {max(self._hosts)}, and at least one, got {set(chosen)}"
            )
        return chosen

    def _between(self, ranks: Iterable[int], direction: Direction, probability: float) -> list[_Rule]:
        inside = self._checked(ranks)
        outside = frozenset(self._hosts) - inside
        if not outside:
            raise ValueError("a cut is between some hosts and the others, got all of them: leave some out")
        rules = list[_Rule]()
        if direction != "b_to_a":
            rules.append(_Rule(outside, inside, probability))
        if direction != "a_to_b":
            rules.append(_Rule(inside, outside, probability))
        return rules

    def _add(self, rules: list[_Rule]) -> Heal:
        self._rules += rules
        self._write_rules()

        def heal() -> None:
            for rule in rules:
                self._rules.remove(rule)
            self._write_rules()

        return once(heal)

    def _write_rules(self) -> None:
        self._bridge.run(
            ["nft", "-f", "-"],
            _text(
                [
                    "table bridge faults",
                    "delete table bridge faults",
                    "table bridge faults { chain between { type filter hook forward priority 0; policy accept;",
                    *(rule.text for rule in self._rules),
                    "}",
                    "}",
                ]
            ),
        )
        self.changed.unpark_all()

    def _write_rates(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            rates = self._rates[rank]
            ends = ((self._bridge, _cable(rank)), (self._hosts[rank], "eth0"))
            for namespace, device in ends:
                if rates:
                    shape = ["rate", f"{round(min(rates))}bit", "burst", str(_BURST_BYTES), "latency", _LATENCY]
                    namespace.run(["tc", "qdisc", "replace", "dev", device, "root", "tbf", *shape])
                else:
                    namespace.run(["tc", "qdisc", "del", "dev", device, "root"])


@contextmanager
def open_host_network(count: int) -> Generator[HostNetwork, None, None]:
    """Make a network of `count` hosts and the controller, which is this thread, while the body runs.

    Processes that this thread starts then, and its new sockets, are in the controller's namespace. The network ends
    with the block, or with this process, in whatever way it ends.

    Raises:
        OSError, RuntimeError: It cannot be made here; see `why_no_networks`.
    """
    with ExitStack() as stack:
        network = HostNetwork(stack, count)
        stack.enter_context(network.namespace(CONTROLLER).entered())
        yield network


def _new_namespace(stack: ExitStack) -> NetNamespace:
    made = NetNamespace()
    stack.callback(made.close)
    return made


def _cable(rank: int) -> str:
    return "controller" if rank == CONTROLLER else f"host{rank}"


def _cables(ranks: Iterable[int]) -> str:
    return ", ".join(_cable(rank) for rank in sorted(ranks))


def _text(lines: Iterable[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


# ---- network namespaces without names: each is a descriptor of this process, and ends with its last user -------------

_CLONE_NEWNET: Final = 0x40000000
_OWN: Final = "/proc/thread-self/ns/net"
_KEPT_THREAD: Final = "Trio thread"
_SYSTEM_PATH: Final = "/usr/sbin:/sbin:/usr/bin:/bin"

_libc = ctypes.CDLL(None, use_errno=True)


class NetNamespace:
    """A new, empty network namespace, without loopback.

    Raises:
        OSError: This user may not make one.
    """

    def __init__(self) -> None:
        made = list[int | OSError]()

        def make() -> None:
            try:
                _check(_libc.unshare(_CLONE_NEWNET), "unshare")
                made.append(os.open(_OWN, os.O_RDONLY | os.O_CLOEXEC))
            except OSError as error:
                made.append(error)

        thread = threading.Thread(target=make, name="new namespace")  # `unshare` moves only its thread
        thread.start()
        thread.join()
        (found,) = made
        if isinstance(found, OSError):
            raise found
        self._fd = found

    @property
    def path(self) -> str:
        """Path of it for other processes of this user, while it is open."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    @property
    def prefix(self) -> list[str]:
        """Return the argv prefix that runs a command in it, by exec: the pid stays the same."""
        return [tool("nsenter"), f"--net={self.path}", "--"]

    def run(self, command: Sequence[str], text: str = "") -> str:
        """Run a command in it, with `text` as its input; return its output.

        Raises:
            RuntimeError: The command failed; the text has its output.

        Blocking: some milliseconds.
        """
        found = subprocess.run(  # noqa: S603 - the command is a test's own
            [*self.prefix, tool(command[0]), *command[1:]], input=text, capture_output=True, text=True, check=False
        )
        if found.returncode != 0:
            words = found.stderr.strip() or found.stdout.strip()
            raise RuntimeError(f"{' '.join(command)} failed: {words}; its input was:\n{text}")
        return found.stdout

    @contextmanager
    def entered(self) -> Generator[None, None, None]:
        """Move this thread, the processes it starts, and its new sockets into it while the body runs.

        Idle threads of Trio are moved, too, there and back, because they start processes.

        Raises:
            OSError: This user may not.
        """
        before = os.open(_OWN, os.O_RDONLY | os.O_CLOEXEC)
        try:
            _enter(self._fd)
            try:
                yield
            finally:
                _enter(before)
        finally:
            os.close(before)

    def close(self) -> None:
        """Close its descriptor; it ends with the last process in it."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _enter(fd: int) -> None:
    """Move this thread, and the idle threads of Trio, into a namespace: a new thread starts in that of its maker.

    Raises:
        OSError: This user may not.
    """
    _check(_libc.setns(fd, _CLONE_NEWNET), "setns")
    count = sum(thread.name.startswith(_KEPT_THREAD) for thread in threading.enumerate())
    met = threading.Barrier(count + 1)

    def enter() -> None:
        _libc.setns(fd, _CLONE_NEWNET)
        met.wait()  # makes each of these calls take a thread of its own

    for _ in range(count):
        trio.lowlevel.start_thread_soon(enter, lambda _: None)
    met.wait()


def tool(name: str) -> str:
    """Return the path of a system command; its name if it is not found."""
    return shutil.which(name) or shutil.which(name, path=_SYSTEM_PATH) or name


def missing_tools(names: Sequence[str]) -> list[str]:
    """Return the commands that are not found."""
    return [name for name in names if os.path.basename(tool(name)) == tool(name)]


def _check(result: int, call: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")
