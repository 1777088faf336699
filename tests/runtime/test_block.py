"""What a block raises when it has been left (rules E08, E09, X3)."""

from __future__ import annotations

from typing import Any

import pytest
import trio

from trimesh._runtime.meshes.block import Left, raise_all
from trimesh.errors import MeshErrorGroup, leaves


class OwnGroup(BaseExceptionGroup[Any]):
    """A group that is no `Exception`, whatever is in it, and neither are its parts."""

    def derive(self, excs: Any, /) -> OwnGroup:
        return OwnGroup(self.message, excs)


def left_with(
    error: BaseException, *, first: tuple[Exception, ...] = (), late: tuple[Exception, ...] = ()
) -> BaseException:
    with pytest.raises(BaseException) as caught:  # noqa: PT011 - any
        raise_all("trainers", Left([*first], error, [*late]))
    return caught.value


def cancelled() -> trio.Cancelled:
    return trio.Cancelled._create(source="unknown")


def test_block_that_came_to_nothing_raises_nothing() -> None:
    raise_all("trainers", Left([], None, []))


def test_failures_come_in_the_order_of_their_moments() -> None:
    """X3."""
    raised = left_with(KeyError("body"), first=(ValueError("first"),), late=(OSError("late"),))

    assert type(raised) is MeshErrorGroup
    assert raised.mesh == "trainers"
    assert [type(leaf) for leaf in leaves(raised)] == [ValueError, KeyError, OSError]


def test_cancel_of_a_healthy_block_is_raised_as_it_is() -> None:
    """E08."""
    error = cancelled()

    assert left_with(error) is error


def test_cancel_beside_a_failure_goes() -> None:
    """E08."""
    raised = left_with(BaseExceptionGroup("g", [cancelled(), KeyError("body")]))

    assert type(raised) is ExceptionGroup
    assert [type(leaf) for leaf in leaves(raised)] == [KeyError]


def test_interrupt_stands_beside_the_failures() -> None:
    """E09."""
    raised = left_with(BaseExceptionGroup("g", [KeyboardInterrupt(), KeyError("body")]), late=(OSError("late"),))

    assert type(raised) is BaseExceptionGroup
    assert type(raised.exceptions[0]) is MeshErrorGroup
    assert [type(leaf) for leaf in leaves(raised)] == [KeyError, OSError, KeyboardInterrupt]


def test_group_of_a_class_that_is_no_exception_is_not_lost() -> None:
    """E09."""
    raised = left_with(OwnGroup("g", [KeyError("body")]), first=(ValueError("first"),))

    assert [type(leaf) for leaf in leaves(raised)] == [ValueError, KeyError]
