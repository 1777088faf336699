"""Exceptions as they look after they were raised and sent."""

from __future__ import annotations

from collections.abc import Iterator

from trimesh._wire.exceptions.codec import decode_exception, encode_exception
from trimesh._wire.pickled.payload import Decoder, Encoder
from trimesh.errors import Origin, RemoteTraceback
from trimesh.shape.extent import Extent

POINT = Extent(gpus=4).point(2)


HERE = Origin(point=POINT, mesh="trainers", actor="Trainer", endpoint="step", host="a", pid=7, incarnation=2)


def round_trip(error: BaseException, *, where: Origin | None = None, note: str = "") -> Exception:
    encoded = encode_exception(error, Encoder(), where=where, note=note)
    assert encoded.buffers == ()
    return decode_exception(encoded.payload, Decoder())


def raised(error: BaseException) -> BaseException:
    """Return `error` as it looks after it was raised."""
    try:
        raise error
    except BaseException as caught:  # noqa: BLE001 - any
        return caught


def own_chain(error: BaseException) -> Iterator[BaseException]:
    """Yield the exceptions of a chain, remote tracebacks as well."""
    link: BaseException | None = error
    while link is not None:
        yield link
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)


def remote_texts(error: BaseException) -> list[str]:
    return [link.text for link in own_chain(error) if isinstance(link, RemoteTraceback)]
