"""Whatever bytes a peer sends as a message of the engine, nothing but `ProtocolError` comes of them."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest

from trimesh.errors import ProtocolError

torch = pytest.importorskip("torch", reason="torch is an extra")
hypothesis = pytest.importorskip("hypothesis")

import msgspec  # noqa: E402
from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from trimesh.shape.extent import Extent  # noqa: E402
from trimesh.tensor import protocol, service  # noqa: E402
from trimesh.tensor.arguments import read  # noqa: E402
from trimesh.tensor.rank import Rank, TeamOnRank  # noqa: E402
from trimesh.tensor.reader import Reader  # noqa: E402
from trimesh.tensor.signature import define  # noqa: E402

assert service, "it puts the kernels into their table"

pytestmark = [pytest.mark.torch]

CPU = torch.device("cpu")

WORDS = st.sampled_from(
    ["r", "n", "b", "l", "t", "d", "c", "y", "dtype", "device", "float32", "cpu", "aten::add.Tensor", "aten::ones",
     "trimesh::put", "trimesh::fetch", "trimesh::index", "trimesh::nothing", "global::aten::mm", "aten::nothing"]
)  # fmt: skip
LEAVES = (
    st.none() | st.booleans() | st.integers(-3, 40) | st.floats() | WORDS | st.text(max_size=4) | st.binary(max_size=4)
)
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=5) | st.dictionaries(WORDS, inner, max_size=2), max_leaves=20
)
STREAMS = st.lists(st.integers(-1, 20) | VALUES, max_size=12)
DESCRIPTIONS = st.tuples(
    WORDS, st.lists(VALUES, max_size=4).map(lambda parts: ["l", *parts]), st.just(["d"]),
    st.lists(st.integers(-2, 3), max_size=3), st.lists(st.integers(-2, 3), max_size=3),
).map(list)  # fmt: skip


@given(st.binary(max_size=200))
def test_bytes(payload: bytes) -> None:
    with suppress(ProtocolError):
        protocol.decode(payload)


@given(st.lists(VALUES, max_size=8))
def test_structs(parts: list[Any]) -> None:
    with suppress(ProtocolError):
        protocol.decode(msgspec.msgpack.encode(parts))


@given(VALUES)
def test_arguments(described: Any) -> None:
    with suppress(ProtocolError):
        build, _, end = read(described, 0, CPU)
        assert end >= 0
        assert build is None or callable(build)


@given(DESCRIPTIONS | VALUES)
def test_descriptions(described: Any) -> None:
    with suppress(ProtocolError):
        assert define(described, CPU).arity >= 0


class _Outside:
    """Takes what a rank says."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


@given(st.lists(st.tuples(st.just(protocol.DEFINE), st.integers(16, 18), DESCRIPTIONS), max_size=3), STREAMS)
def test_streams(definitions: list[tuple[Any, ...]], stream: list[Any]) -> None:
    """What is understood is executed: whatever it is, the rank lives on."""
    team = TeamOnRank(1, Extent(gpus=1), [0], [], 0, 0)
    rank = Rank("procs", Extent(gpus=1), 0, CPU, _Outside())
    with suppress(ProtocolError):
        steps = Reader(CPU).read([word for words in definitions for word in words] + stream, [memoryview(b"1234")])
        for step in steps:
            step.execute(rank, team)
        assert team.done <= len(stream)
