"""Whatever bytes a peer sends as a message of the engine, nothing but `ProtocolError` comes of them."""

from __future__ import annotations

from contextlib import suppress
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

import trimesh
from trimesh import Actor, endpoint, limits, this_host
from trimesh._runtime.values.codec import Values
from trimesh.errors import MeshErrorGroup, Origin, PayloadError, ProtocolError
from trimesh.ids import ProcId

torch = pytest.importorskip("torch", reason="torch is an extra")
hypothesis = pytest.importorskip("hypothesis")

import msgspec  # noqa: E402
from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from trimesh.shape.extent import Extent  # noqa: E402
from trimesh.tensor.controller import shapes  # noqa: E402
from trimesh.tensor.controller.engine import RankRequest, values_of  # noqa: E402
from trimesh.tensor.kernels.table import KERNELS  # noqa: E402
from trimesh.tensor.protocol import messages  # noqa: E402
from trimesh.tensor.protocol.arguments import read  # noqa: E402
from trimesh.tensor.rank.function_parts import LocalMeta, Operand  # noqa: E402
from trimesh.tensor.rank.kernel import define  # noqa: E402
from trimesh.tensor.rank.rank import Rank, TeamOnRank  # noqa: E402
from trimesh.tensor.rank.reader import CommandReader, SequenceReader  # noqa: E402
from trimesh.tensor.session import service  # noqa: E402

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
        messages.decode(payload)


@given(st.lists(VALUES, max_size=8))
def test_structs(parts: list[Any]) -> None:
    with suppress(ProtocolError):
        messages.decode(msgspec.msgpack.encode(parts))


@given(VALUES)
def test_arguments(described: Any) -> None:
    with suppress(ProtocolError):
        build, _, end = read(described, 0, CPU)
        assert end >= 0
        assert build is None or callable(build)


@given(DESCRIPTIONS | VALUES)
def test_descriptions(described: Any) -> None:
    with suppress(ProtocolError):
        assert define(described, CPU, KERNELS).arity >= 0


class _Outside:
    """Takes what a rank says."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


@given(st.lists(st.tuples(st.just(messages.DEFINE), st.integers(16, 18), DESCRIPTIONS), max_size=3), STREAMS)
def test_streams(definitions: list[tuple[Any, ...]], stream: list[Any]) -> None:
    """What is understood is executed: whatever it is, and however often, the rank lives on."""
    team = TeamOnRank(1, Extent(gpus=1), [0], [], 0, 0)
    rank = Rank("procs", Extent(gpus=1), 0, CPU, _Outside())
    with suppress(ProtocolError), patch.object(limits, "TENSOR_SEQUENCE_COMMANDS_MIN", 1):
        reader = SequenceReader(CommandReader(CPU, KERNELS), KERNELS.local_sequence)
        reader.read([word for words in definitions for word in words], [])
        for _ in range(4):
            for step in reader.read(stream, [memoryview(b"1234")]):
                step.execute(rank, team)
        assert team.done <= 4 * len(stream)


_LIKE = SimpleNamespace(size=(2,), dtype=torch.float32)
FORMS = st.sampled_from(
    [shapes.ANYTHING, shapes.ONE_TENSOR, shapes.RNG_STATE, shapes.RESULTS, shapes.layout_along(1),
     shapes.metas_of(1), shapes.tensors_like([_LIKE] * 2), shapes.tensors_like([_LIKE], only_first=True)]
)  # fmt: skip
METADATA = st.builds(LocalMeta, st.tuples(LEAVES), st.tuples(LEAVES), LEAVES) | st.tuples(
    st.lists(st.integers(-1, 2), max_size=2), st.lists(st.integers(-1, 2), max_size=2), WORDS
)
TENSORS = st.builds(lambda size, dtype: torch.zeros(size, dtype=dtype), st.integers(0, 3), st.sampled_from(
    [torch.float32, torch.uint8]
))  # fmt: skip
ANSWERS = st.recursive(
    LEAVES | TENSORS | METADATA | st.builds(Operand, LEAVES),
    lambda inner: st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple),
    max_leaves=6,
)


def _request(form: shapes.Expected) -> RankRequest:
    engine = SimpleNamespace(
        proc=SimpleNamespace(values=Values(ProcId(1))), failure=lambda team, number: None, name="procs"
    )
    team: Any = SimpleNamespace(engine=engine, name="procs", origins=[Origin(None, "procs")] * 2, peers=[])
    return RankRequest(1, team, form, {})


@given(FORMS, st.integers(0, 1), ANSWERS | st.binary(max_size=60), st.none() | st.tuples(st.integers(), st.integers()))
def test_answers(form: shapes.Expected, place: int, sent: Any, failed_at: Any) -> None:
    """What a rank sends is of the form that was asked for, or breaks the protocol."""
    request = _request(form)
    payload, bodies = sent, []
    if not isinstance(sent, bytes):
        encoded = request.team.engine.proc.values.encode(sent, what="an answer")
        payload, bodies = encoded.payload, [memoryview(bytearray(buffer)) for buffer in encoded.buffers]
    request.answers[place] = payload, bodies, failed_at, None
    try:
        found = values_of(request)
    except MeshErrorGroup as group:
        [error] = group.exceptions
        assert isinstance(error, ProtocolError) or (not form.is_ours and isinstance(error, PayloadError))
        assert trimesh.origin(error) is not None
    else:
        assert failed_at is None
        assert list(found) == [place]
        assert form.fits(found[place], place)


@given(FORMS, st.integers(0, 40).map(bytes))
def test_packed_answers(form: shapes.Expected, sent: bytes) -> None:
    request = _request(form)
    request.answers[0] = sent
    try:
        found = values_of(request)
    except MeshErrorGroup as group:
        [error] = group.exceptions
        assert isinstance(error, ProtocolError)
    else:
        assert form.fits(found[0], 0)


class Forger(Actor):
    """Lets the rank beside it answer with something else."""

    @endpoint
    async def answer(self, sent: Any) -> None:
        def forged(self: Any, request: int, value: Any) -> None:
            encoded = self.proc.values.encode(sent, what="a forged answer")
            self._send(messages.TensorReply(self.engine, request, b"", None), [encoded.payload, *encoded.buffers])

        service._Hosted._reply = forged
        service._Hosted.reply_packed = lambda self, request, _: self.reply(request, None)


@pytest.mark.real
async def test_a_rank_that_answers_something_else() -> None:
    async with this_host().spawn_procs({"gpus": 2}, preload=("torch", "torch.distributed.tensor")) as procs:
        forgers = await procs.spawn("forgers", Forger)
        with procs.activate():
            t = torch.arange(4.0)
        there = trimesh.distribute(torch.ones(4), procs, ["gpus"])
        same = trimesh.remote(lambda t: t, propagate="inspect")

        async def fetch(tensor: Any) -> Any:
            return await trimesh.fetch(tensor)

        async def now(function: Any) -> Any:
            return function()

        for sent in (
            None,
            3,
            [],
            [torch.ones(3)],
            [[[-1], [1], "nothing"]],
            ([], ["sum"]),
            ([LocalMeta((1,), (), 3)], 1),
        ):
            await forgers.slice(gpus=0).answer.call_one(sent)
            for ask in (
                lambda: fetch(t),
                lambda: fetch(there),
                lambda: trimesh.fetch_shard(there, gpus=0),
                lambda: trimesh.placements(there),
                lambda: trimesh.get_rng_state(procs),
                lambda: now(t.sum().item),
                lambda: now(lambda: t[t > 1]),
                lambda: now(lambda: same(t)),
                lambda: now(lambda: str(t)),
            ):
                with pytest.raises(MeshErrorGroup) as caught:
                    await ask()
                [error] = caught.value.exceptions
                assert isinstance(error, ProtocolError)
                assert trimesh.origin(error).point == {"gpus": 0}
        assert await trimesh.call_on_shard_and_fetch(lambda t: 1, t, shard={"gpus": 1}) == 1
