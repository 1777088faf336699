"""What goes by value, once per link, and comes home as the same object (rule V2)."""

from __future__ import annotations

import pickle
import subprocess
import sys
from typing import Any

import pytest
from tests.wire.conftest import Script
from tests.wire.sides import Side, side

from trimesh._wire.memory import DefinitionId
from trimesh._wire.pickled.payload import Encoded
from trimesh.errors import PayloadError, ProtocolError

# ---- once per link, the same object everywhere -----------------------------------------------------------


def test_class_of_main_arrives_and_comes_home_as_itself(home: Side, away: Side, script: Script) -> None:
    """V2."""
    main = script("""
        class Point:
            def __init__(self, x): self.x = x
            def double(self): return Point(2 * self.x)
    """)

    arrived = home.send(main.Point(3), away)

    assert type(arrived) is not main.Point
    assert (type(arrived).__module__, type(arrived).__qualname__) == ("__main__", "Point")
    assert arrived.double().x == 6
    assert type(arrived.double()) is type(arrived)
    back = away.send(arrived.double(), home)
    assert type(back) is main.Point
    assert back.x == 6


def test_definition_travels_once_per_link(home: Side, away: Side, script: Script) -> None:
    """V2."""
    main = script("""
        class Point:
            pass
    """)

    first = home.send(main.Point(), away)
    count = len(home.sent)
    payload = home.encoder.encode(main.Point(), what="v").payload
    second = home.send([main.Point(), main.Point], away)

    assert count == len(home.sent) >= 1
    assert len(payload) < 200
    assert type(second[0]) is type(first) is second[1]
    away.send(second, home)
    assert [entry for entry in away.sent if entry[1].startswith("a.")] != []  # lists them; the link knows them
    assert all(home.definitions.owns(d) for _, d in away.sent)


def test_class_relayed_between_workers_is_the_same_at_home(home: Side, away: Side, third: Side, script: Script) -> None:
    """V2."""
    main = script("""
        class Base: pass
        class Point(Base):
            def name(self): return type(self).__name__ + Base.__name__
    """)

    far = away.send(home.send(main.Point(), away), third)

    assert far.name() == "PointBase"
    assert type(third.send(far, home)) is main.Point


def test_class_known_from_two_links_is_one(home: Side, away: Side, third: Side, script: Script) -> None:
    main = script("class Point: pass")

    direct = home.send(main.Point(), third)
    relayed = away.send(home.send(main.Point(), away), third)

    assert type(direct) is type(relayed)


def test_redefined_class_is_a_new_definition(home: Side, away: Side, script: Script) -> None:
    """V2: a notebook cell that is run again."""
    main = script("class Point: version = 1")
    old = main.Point
    first = home.send(old(), away)
    main = script("class Point: version = 2")

    second = home.send(main.Point(), away)

    assert (first.version, second.version) == (1, 2)
    assert type(away.send(first, home)) is old
    assert type(away.send(second, home)) is main.Point
    assert away.main.Point is type(second)


def test_ids_are_counted_never_drawn(script: Script) -> None:
    """BV-1."""
    main = script("""
        from typing import TypeVar, Generic
        T = TypeVar("T")
        limit = {"a": 1}
        class Box(Generic[T]):
            def get(self) -> T: return limit
    """)

    one, two = side("one", 0xA), side("two", 0xA)
    for _ in range(2):
        first = one.encoder.encode(main.Box(), what="v")
        second = two.encoder.encode(main.Box(), what="v")

    assert first == second
    assert [one.definitions.bytes_of(d) for d in first.definitions] == [
        two.definitions.bytes_of(d) for d in second.definitions
    ]


def test_definition_is_not_unpickled_before_it_is_needed(home: Side, away: Side, script: Script) -> None:
    main = script("""
        class Loud:
            def __init_subclass__(cls): raise AssertionError("made")
        try:
            class Quiet(Loud): pass
        except AssertionError:
            Quiet = Loud.__subclasses__()
    """)
    encoded = home.encoder.encode(main.Loud(), what="v")

    home.deliver(encoded.definitions, away)

    assert away.main.__dict__.get("Loud") is None
    assert type(away.decoder.decode(encoded.payload)).__name__ == "Loud"
    assert away.main.Loud is not None


def test_value_before_its_definition_is_a_payload_error(home: Side, away: Side, script: Script) -> None:
    encoded = home.encoder.encode(script("class Point: pass").Point(), what="v")

    with pytest.raises(PayloadError, match="must be sent ahead"):
        away.decoder.decode(encoded.payload)


@pytest.mark.parametrize("payload", [b"", b"\x93", b"junk", b"\x94\xa1a\xc3\x90"])
def test_broken_definition_is_a_protocol_error(away: Side, payload: bytes) -> None:
    with pytest.raises(ProtocolError):
        away.definitions.define(DefinitionId("a.1"), payload)


def test_definition_in_our_own_name_is_a_protocol_error(home: Side, away: Side, script: Script) -> None:
    encoded = home.encoder.encode(script("class Point: pass").Point(), what="v")
    data = home.definitions.bytes_of(encoded.definitions[0])

    with pytest.raises(ProtocolError, match="only this process"):
        away.definitions.define(DefinitionId("b.77"), data.payload)
    home.definitions.define(encoded.definitions[0], b"\x94\xa1a\xc2\x90\xc4\x00")  # what it knows it keeps


def test_encoded_size_counts_everything() -> None:
    assert Encoded(b"abc", (memoryview(b"de"),), (), ()).nbytes == 5


# ---- on the worker's __main__ ----------------------------------------------------------------------------


def test_class_is_put_on_main_so_that_pickles_find_it(
    home: Side, away: Side, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    """V2."""
    main = script("""
        class Outer:
            class Inner: pass
        def function(): return 1
    """)
    arrived = home.send([main.Outer(), main.Outer.Inner(), main.function], away)

    monkeypatch.setitem(sys.modules, "__main__", away.main)
    again = pickle.loads(pickle.dumps(arrived))

    assert [type(a) for a in again] == [type(a) for a in arrived]
    assert again[2] is arrived[2]


def test_name_that_is_taken_on_main_is_left_alone(home: Side, away: Side, script: Script) -> None:
    """V2."""
    away.main.Point = "theirs"  # type: ignore[attr-defined]

    home.send(script("class Point: pass").Point(), away)

    assert away.main.Point == "theirs"


def test_main_of_the_receiver_gets_nothing_else(home: Side, away: Side, script: Script) -> None:
    """V2: neither globals nor imports nor the script itself."""
    before = set(away.main.__dict__)
    main = script("""
        import json
        limit = 3
        def encode(x): return json.dumps([x, limit])
    """)

    assert home.send(main.encode, away)(1) == "[1, 3]"
    assert set(away.main.__dict__) - before == {"encode"}


# ---- in another process ----------------------------------------------------------------------------------


WORKER = """
import pickle, sys
from trimesh._wire.pickled.by_value import Definitions
from trimesh._wire.pickled.payload import Decoder, Encoder
definitions = Definitions(2, sys.modules["__main__"])
encoder, decoder = Encoder(definitions), Decoder(definitions)
sent, payload = pickle.load(sys.stdin.buffer)
for name, data in sent:
    definitions.define(name, data)
value = decoder.decode(payload)
assert "__main__ of the user" not in (globals().get("__doc__") or "")
copy = pickle.loads(pickle.dumps(value))  # found on this process's __main__
assert type(copy) is type(value)
answer = encoder.encode([copy.double(), type(copy)], what="answer")
new = [(d, definitions.bytes_of(d).payload) for d in answer.definitions if definitions.owns(d)]
pickle.dump((new, answer.payload), sys.stdout.buffer)
"""


USER = """
'''__main__ of the user'''
import pickle, subprocess, sys
from trimesh._wire.pickled.by_value import Definitions
from trimesh._wire.pickled.payload import Decoder, Encoder
print("imported once")
factor = 2
class Point:
    def __init__(self, x): self.x = x
    def double(self): return Point(self.x * factor)
definitions = Definitions(1)
encoder, decoder = Encoder(definitions), Decoder(definitions)
encoded = encoder.encode(Point(4), what="v")
sent = {}
def collect(ids):
    for d in ids:
        if d not in sent:
            data = definitions.bytes_of(d)
            sent[d] = data.payload
            collect(data.definitions)
collect(encoded.definitions)
worker = subprocess.run([sys.executable, "-c", sys.argv[1]], input=pickle.dumps((list(sent.items()), encoded.payload)),
                        stdout=subprocess.PIPE, check=True)
new, payload = pickle.loads(worker.stdout)
point, cls = decoder.decode(payload)
assert not new and type(point) is Point and cls is Point and point.x == 8
print("the same class")
"""


@pytest.mark.real
def test_class_goes_to_a_process_and_comes_back(tmp_path: Any) -> None:
    """V2: no guard around the script is needed, for it is never imported."""
    path = tmp_path / "user.py"
    path.write_text(USER)

    done = subprocess.run([sys.executable, str(path), WORKER], capture_output=True, text=True, check=False, timeout=60)

    assert (done.stdout, done.stderr, done.returncode) == ("imported once\nthe same class\n", "", 0)
