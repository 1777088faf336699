"""Context managers that let errors pass which refuse attributes."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncGenerator, Generator

import pytest

from trimesh.context_managers import asynccontextmanager, contextmanager


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    """Refuses every attribute once it is made."""

    code: int


def test_error_passes_as_it_is() -> None:
    @contextmanager
    def block() -> Generator[int, None, None]:
        yield 1

    with pytest.raises(Frozen) as caught, block() as value:
        assert value == 1
        raise Frozen(1)
    assert caught.value.__traceback__ is not None
    with pytest.raises(ValueError, match="other"), block():
        raise ValueError("other")


def test_error_may_be_swallowed_or_replaced() -> None:
    @contextmanager
    def block(*, replaces: bool) -> Generator[None, None, None]:
        try:
            yield
        except Frozen:
            if replaces:
                raise KeyError from None

    with block(replaces=False):
        raise Frozen(1)
    with pytest.raises(KeyError), block(replaces=True):
        raise Frozen(1)


async def test_async_error_passes_as_it_is() -> None:
    @asynccontextmanager
    async def block(*, swallows: bool) -> AsyncGenerator[int, None]:
        try:
            yield 1
        except Frozen:
            if not swallows:
                raise

    with pytest.raises(Frozen):
        async with block(swallows=False):
            raise Frozen(1)
    async with block(swallows=True) as value:
        assert value == 1
        raise Frozen(1)


def test_generator_that_goes_on_is_refused() -> None:
    @contextmanager
    def block() -> Generator[None, None, None]:
        try:
            yield
        except Frozen:
            yield

    with pytest.raises(RuntimeError, match="didn't stop"), block():
        raise Frozen(1)
