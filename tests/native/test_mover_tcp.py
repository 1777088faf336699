"""The carrier tcp: its protocol as a stranger speaks it, hostile clients, owners that do not answer."""

from __future__ import annotations

import errno
import gc
import os
import random
import signal
import socket
import stat
from collections.abc import Iterator

import pytest
from tests.native.mover import ADD, ALL, HOST, READ, TCP, WRITE, Mover, Other, ffi, lib, pattern
from tests.native.movers import LOOPBACK
from tests.native.tcp_client import BODY_BYTES_MAX, CONNECTIONS_MAX, Answer, Client, siphash
from tests.native.test_fork import in_child

from trimesh import limits

pytestmark = pytest.mark.real

SIZE = 4 << 20
HUGE = 256 << 20
DESCRIPTORS = 200
"""That a process may have, with room for its own."""


@pytest.fixture
def owner() -> Iterator[Other]:
    """A process that listens."""
    other = Other(7, address=LOOPBACK)
    yield other
    other.close()


@pytest.fixture
def reader() -> Iterator[Mover]:
    """A mover of this process that comes by tcp only."""
    mover = Mover(8, TCP)
    yield mover
    mover.close()


@pytest.fixture
def client(owner: Other) -> Iterator[Client]:
    """A connection to the owner that was greeted."""
    one = Client(owner.call("home"))
    assert one.greet() == 7
    yield one
    one.close()


def assert_works(owner: Other, reader: Mover) -> None:
    """The owner goes on serving."""
    local = bytearray(SIZE)
    grant = owner.call("grant", SIZE, seed=11)
    assert reader.move(reader.attach(owner.call("home")), READ, grant, local).status == lib.TM_OK
    assert local == pattern(SIZE, 11)


# ---- the protocol ----------------------------------------------------------------------------------------------------


def test_hash_is_the_one_that_everybody_has():
    """The vectors of its authors."""
    key = bytes(range(16))
    assert siphash(key, b"").hex() == "a3817f04ba25a8e66df67214c7550293"
    assert siphash(key, bytes(range(9))).hex() == "264499060ad9baabc47f8b02bb6d71ed"
    assert siphash(key, bytes(range(15))).hex() == "5493e99933b0a8117e08ec0f97cfc3d9"


def test_requests_are_answered_in_turn(owner: Other, client: Client):
    grant = owner.call("grant", 8192, seed=2)
    first = client.request(READ, grant, counter=0, offset=100, size=3000)
    second = client.request(WRITE, grant, counter=1, offset=8, size=5) + b"bytes"
    third = client.request(ADD, grant, counter=2, operand=1)
    client.send(first + second + third)

    assert client.answer() == Answer(0, lib.TM_UNDER_WAY, 3000, 0)
    assert client.receive(3000) == pattern(8192, 2)[100:3100]
    assert client.answer() == Answer(0, lib.TM_OK, 0, 0)
    assert client.answer() == Answer(1, lib.TM_OK, 0, 0)
    word = int.from_bytes(pattern(8, 2), "little")
    assert client.answer() == Answer(2, lib.TM_OK, 0, word)
    assert owner.call("peek", grant["address"] + 8, 5) == b"bytes".hex()
    assert owner.call("revoke", grant) == lib.TM_OK


def test_client_that_wants_another_process_is_told_and_sent_away(owner: Other):
    client = Client(owner.call("home"))
    assert client.greet(epoch=8) == 7
    assert client.is_closed()
    client.close()


# ---- who does not know the secret ------------------------------------------------------------------------------------


def test_without_the_secret_all_answers_are_alike(owner: Other, client: Client):
    """Neither a place, nor a generation, nor a range can be found out."""
    grant = owner.call("grant", 64)
    revoked, dropped = owner.call("grant", 64), owner.call("grant", 64)
    owner.call("revoke", revoked)
    owner.call("revoke", dropped)
    owner.call("drop", dropped)
    guesses = [
        grant,
        revoked,
        dropped,
        {**grant, "generation": 2},
        {**grant, "generation": 0},
        {**grant, "place": 5000},
        {**grant, "place": (1 << 32) - 1},
    ]
    counter = 0
    for guess in guesses:
        for kind in (READ, WRITE, ADD):
            body = bytes(8) if kind == WRITE else b""
            client.send(client.request(kind, {**guess, "secret": "ab" * 16}, counter=counter, operand=1) + body)
            assert client.answer() == Answer(counter, lib.TM_ERR_DENIED, 0, 0)
            counter += 1
    client.send(client.request(ADD, dropped, counter=counter))
    assert client.answer().status == lib.TM_ERR_REVOKED  # who knows it is told
    assert owner.call("peek", grant["address"], 64) == pattern(64).hex()


def test_request_is_worth_nothing_a_second_time(owner: Other, client: Client):
    grant = owner.call("grant", 64)
    request = client.request(ADD, grant, operand=1)
    client.send(request)
    assert client.answer().status == lib.TM_OK
    other = Client(owner.call("home"))
    other.greet()

    other.send(request)
    assert other.answer().status == lib.TM_ERR_DENIED
    client.send(request)
    assert client.is_closed()

    other.close()
    changed = int.from_bytes(bytes.fromhex(owner.call("peek", grant["address"], 8)), "little")
    assert changed == int.from_bytes(pattern(8), "little") + 1


# ---- hostile clients -------------------------------------------------------------------------------------------------


@pytest.mark.daily
def test_garbage_ends_its_connection_and_nothing_else(owner: Other, reader: Mover):
    numbers = random.Random(5)
    grant = owner.call("grant", 8192)
    home = owner.call("home")
    for turn in range(60):
        client = Client(home)
        if turn % 3:
            client.greet()
            size = numbers.choice((8, 100, BODY_BYTES_MAX))
            request = bytearray(client.request(numbers.choice((READ, WRITE, ADD)), grant, size=size))
            for _ in range(turn % 5):
                request[numbers.randrange(16)] ^= 1 << numbers.randrange(8)
            client.send(request[: numbers.randrange(len(request) + 1)] if turn % 2 else bytes(request))
        else:
            client.send(numbers.randbytes(500))
            assert client.is_closed()
        client.close()
    assert_works(owner, reader)
    assert owner.call("revoke", grant) == lib.TM_OK


def test_requests_that_cannot_be_end_the_connection(owner: Other):
    grant = owner.call("grant", 64)
    for options in ({"kind": 5}, {"kind": 0}, {"size": BODY_BYTES_MAX + 1}, {"kind": ADD, "size": 16}, {"counter": 1}):
        client = Client(owner.call("home"))
        client.greet()
        client.send(client.request(**{"kind": READ, "grant": grant, **options}))
        assert client.is_closed(), options
        client.close()


def test_half_of_anything_is_waited_for_a_bounded_time(owner: Other, reader: Mover):
    """Nothing, half a hello, a hello, half a request, half a body."""
    grant = owner.call("grant", 64)
    home = owner.call("home")
    clients = [Client(home) for _ in range(5)]
    clients[1].send(b"trime")
    for client in clients[2:]:
        client.greet()
    clients[3].send(clients[3].request(READ, grant)[:50])
    clients[4].send(clients[4].request(WRITE, grant, size=64) + bytes(10))

    for client in clients:
        assert client.is_closed()
        client.close()
    assert_works(owner, reader)
    assert owner.call("revoke", grant) == lib.TM_OK


def test_flood_of_connections_keeps_nobody_out(owner: Other, reader: Mover):
    home = owner.call("home")
    known = Client(home)
    known.greet()
    grant = owner.call("grant", 64)
    known.send(known.request(ADD, grant))
    assert known.answer().status == lib.TM_OK

    flood = [Client(home) for _ in range(CONNECTIONS_MAX + 50)]

    assert_works(owner, reader)
    known.send(known.request(ADD, grant, counter=1))
    assert known.answer().status == lib.TM_OK  # who has shown a secret makes way for nobody
    for client in [known, *flood]:
        client.close()


def test_strangers_take_a_share_of_the_descriptors(owner: Other, reader: Mover):
    """However many connections somebody makes and holds, the program can open its own files."""
    assert_works(owner, reader)
    before = owner.call("descriptors")
    share = DESCRIPTORS // limits.TCP_STRANGERS_SHARE
    owner.call("limit_descriptors", DESCRIPTORS)

    held = [Client(owner.call("home")) for _ in range(DESCRIPTORS)]

    assert held[0].is_closed()  # the oldest makes way
    assert_works(owner, reader)
    assert owner.call("descriptors") <= before + share
    assert held[-1].greet() == 7
    for client in held:
        client.close()


# ---- revoking --------------------------------------------------------------------------------------------------------


def revoke_soon(owner: Other, grant: dict[str, object]) -> None:
    """Revoke; nobody may stay at it, though the client stands still."""
    while owner.call("revoke", grant) == lib.TM_FULL:
        pass
    assert owner.call("drop", grant) == lib.TM_OK


def test_reader_that_stands_still_keeps_nobody_from_revoking(owner: Other):
    grant = owner.call("grant", SIZE, seed=1)
    client = Client(owner.call("home"), receive_bytes=4096)
    client.greet()
    for counter in range(16):
        request = client.request(READ, grant, counter=counter, size=BODY_BYTES_MAX)
        client.send(request)
    assert client.answer().status == lib.TM_UNDER_WAY

    revoke_soon(owner, grant)

    ends = []
    for counter in range(16):
        if counter:
            begun = client.answer()
            if begun.status != lib.TM_UNDER_WAY:
                ends.append(begun.status)
                continue
        body = client.receive(BODY_BYTES_MAX)
        end = client.answer()
        ends.append(end.status)
        if end.status == lib.TM_OK:
            assert body == pattern(BODY_BYTES_MAX, 1)
        else:
            sent = len(body.rstrip(b"\0"))
            assert body[:sent] == pattern(BODY_BYTES_MAX, 1)[:sent]
    assert set(ends) == {lib.TM_OK, lib.TM_ERR_REVOKED} or set(ends) == {lib.TM_ERR_REVOKED}
    assert ends == sorted(ends, reverse=True)
    client.close()


def test_writer_that_stands_still_writes_nothing_after_a_revocation(owner: Other, client: Client):
    grant = owner.call("grant", 8192)
    client.send(client.request(WRITE, grant, size=8192) + b"a" * 100)
    while owner.call("peek", grant["address"] + 99, 1) != b"a".hex():
        pass

    revoke_soon(owner, grant)
    client.send(b"b" * 8092)

    assert client.answer() == Answer(0, lib.TM_ERR_REVOKED, 0, 0)
    assert owner.call("peek", grant["address"], 8192) == (b"a" * 100 + pattern(8192)[100:]).hex()


# ---- owners that do not answer ---------------------------------------------------------------------------------------


def test_owner_that_is_stopped_is_silent_and_answers_again_later(owner: Other, reader: Mover):
    small, huge = owner.call("grant", 64), owner.call("grant", HUGE)
    attachment = reader.attach(owner.call("home"))
    local, much = bytearray(64), bytearray(HUGE)
    assert reader.move(attachment, READ, small, local).status == lib.TM_OK
    owner.signal(signal.SIGSTOP)
    os.waitid(os.P_PID, owner.pid, os.WSTOPPED)

    begun = [reader.begin(attachment, kind, huge, much)[1] for kind in (READ, WRITE)]
    begun.append(reader.begin(attachment, READ, small, local)[1])

    assert {reader.wait(one.id).status for one in begun} == {lib.TM_ERR_SILENT}
    owner.signal(signal.SIGCONT)
    assert reader.move(attachment, READ, small, local).status == lib.TM_OK


def test_owner_on_another_host_that_is_killed_is_lost(owner: Other):
    """Whether it has ended nobody can see from there."""
    reader = Mover(8, ALL, host=HOST + 1)
    grant, local = owner.call("grant", HUGE), bytearray(HUGE)
    attachment = reader.attach(owner.call("home"))
    assert reader.info(attachment)[0] == TCP
    begun = [reader.begin(attachment, READ, grant, local)[1] for _ in range(20)]

    owner.kill()

    lost = {lib.TM_ERR_ERRNO - errno.ECONNRESET, lib.TM_ERR_ERRNO - errno.ECONNREFUSED}
    assert {reader.wait(one.id).status for one in begun} <= lost
    assert reader.move(attachment, READ, grant, bytearray(8)).status == lib.TM_ERR_ERRNO - errno.ECONNREFUSED
    reader.close()


def test_another_process_at_the_same_port_is_not_the_owner(owner: Other, reader: Mover):
    home = owner.call("home")
    grant = owner.call("grant", 64)
    earlier = [home[0] + 1, HOST + 1, *home[2:]]

    assert reader.move(reader.attach(earlier), READ, grant, bytearray(8)).status == lib.TM_ERR_GONE


# ---- addresses, descriptors ------------------------------------------------------------------------------------------


def test_process_without_an_address_does_not_listen():
    reader, owner = Mover(8, TCP), Other(7)
    home = owner.call("home")
    assert home[5] == 0
    carriers, _, why_not = reader.info(reader.attach(home))
    assert carriers == 0
    assert "tcp: the process does not listen" in why_not
    reader.close()
    owner.close()


def test_address_that_is_not_ours_is_refused():
    out = ffi.new("tm_mover **")
    options = ffi.new("tm_mover_options *", (5, HOST, TCP, 4, bytes([203, 0, 113, 9]).ljust(16, b"\0")))
    assert lib.tm_mover_create(options, out) == lib.TM_ERR_ERRNO - errno.EADDRNOTAVAIL
    assert out[0] == ffi.NULL


def test_ipv6(reader: Mover):
    with socket.socket(socket.AF_INET6) as probe:
        try:
            probe.bind(("::1", 0))
        except OSError:
            pytest.skip("there is no IPv6 here")
    owner = Other(7, address=socket.inet_pton(socket.AF_INET6, "::1"))
    assert_works(owner, reader)
    owner.close()


def sockets() -> int:
    """Return how many sockets this process has."""
    return sum(is_socket(int(name)) for name in os.listdir("/proc/self/fd"))


def is_socket(fd: int) -> bool:
    """Whether a descriptor is one; not if it was closed meanwhile, as that is by which all were listed."""
    try:
        return stat.S_ISSOCK(os.fstat(fd).st_mode)
    except OSError:
        return False


def test_forked_child_has_no_connections(owner: Other, reader: Mover):
    gc.collect()  # sockets that earlier tests have dropped, which would be closed meanwhile
    before = sockets()
    assert_works(owner, reader)
    assert sockets() == before + 2

    def work() -> None:
        assert sockets() == before

    assert in_child(work) == 0
    assert_works(owner, reader)


def test_connections_that_are_not_used_are_closed(owner: Other, reader: Mover):
    gc.collect()  # sockets that earlier tests have dropped, which would be closed meanwhile
    before = sockets(), owner.call("descriptors")
    assert_works(owner, reader)
    assert owner.call("descriptors") == before[1] + 2
    while (sockets(), owner.call("descriptors")) != before:
        pass
