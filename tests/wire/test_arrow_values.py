"""Slices of Arrow tables and arrays send their own rows (rule V1)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.rows import rows

from trimesh._wire.pickled.payload import Decoder, Encoder

pa = pytest.importorskip("pyarrow", reason="these are values of pyarrow, which is no dependency")

ROWS = 50_000


def sent(value: Any) -> tuple[int, Any]:
    """Return the bytes that a value takes, and what arrives."""
    encoded = Encoder().encode(value, what="the value")
    bodies = [memoryview(bytearray(buffer)) for buffer in encoded.buffers]
    nbytes = len(encoded.payload) + sum(body.nbytes for body in bodies)
    return nbytes, Decoder().decode(encoded.payload, bodies)


def table() -> Any:
    return pa.table({"number": pa.array(range(ROWS)), "text": pa.array([str(row) for row in range(ROWS)])})


slices: dict[str, Callable[[], Any]] = {
    "table": lambda: table().slice(5, 3),
    "empty table": lambda: table().slice(7, 0),
    "batch": lambda: table().to_batches()[0].slice(5, 3),
    "empty batch": lambda: table().to_batches()[0].slice(7, 0),
    "chunked array": lambda: table()["text"].slice(5, 3),
    "array": lambda: table()["number"].chunk(0).slice(5, 3),
    "empty array": lambda: table()["number"].chunk(0).slice(7, 0),
    "nulls": lambda: pa.array([True, None] * ROWS).slice(7, 5),
    "lists": lambda: pa.array([[row] for row in range(ROWS)]).slice(7, 5),
    "structs": lambda: pa.array([{"a": row} for row in range(ROWS)]).slice(7, 5),
    "dictionary": lambda: pa.array(["a", "b"] * ROWS).dictionary_encode().slice(7, 5),
    "inside": lambda: {"rows": [table().slice(5, 3)]},
}


@rows("name", slices)
def test_slice_sends_its_rows_alone(name: str) -> None:
    value = slices[name]()
    nbytes, arrived = sent(value)
    assert nbytes < 4_000
    assert type(arrived) is type(value)
    assert arrived == value
    if isinstance(value, pa.Table):
        arrived.validate(full=True)
        assert arrived.schema == value.schema


def test_whole_table_is_left_to_pyarrow() -> None:
    nbytes, arrived = sent(table())
    assert arrived.equals(table())
    assert nbytes < 1.1 * table().nbytes


class Kind(pa.ExtensionType):  # type: ignore[misc]
    """A type of a program."""

    def __init__(self) -> None:
        super().__init__(pa.int64(), "tests.kind")

    def __arrow_ext_serialize__(self) -> bytes:
        return b""

    @classmethod
    def __arrow_ext_deserialize__(cls, storage: Any, data: bytes) -> Kind:
        del storage, data
        return cls()


def test_type_of_a_program_arrives() -> None:
    """The receiver need not have registered it."""
    array = pa.ExtensionArray.from_storage(Kind(), pa.array(range(ROWS))).slice(5, 3)
    _, arrived = sent(array)
    assert arrived.type == Kind()
    assert arrived.storage.to_pylist() == [5, 6, 7]
