"""Options of a call, before anything is sent (rule C6)."""

from __future__ import annotations

from typing import Any

import pytest
from tests.rows import rows

from trimesh import Actor, Backoff, Endpoint, ProcDied, Retry, endpoint, limits
from trimesh._runtime.values.endpoint_spec import endpoints_of
from trimesh.actor.item_map import with_earlier


class Worker(Actor):
    @endpoint
    async def once(self, item: int) -> int:
        return item

    @endpoint(idempotent=True)
    async def again(self, item: int) -> int:
        return item

    @endpoint(idempotent=True)
    async def many(self, item: int):
        yield item


def handle(name: str) -> Endpoint[..., Any]:
    """Return a handle that nothing can be sent by."""
    return Endpoint(None, endpoints_of(Worker)[name])  # type: ignore[arg-type]


@rows(
    ("options", "error", "text"),
    [
        ({"merge": "first"}, ValueError, "merge must be"),
        ({"window": 0}, ValueError, "at least 1"),
        ({"window": limits.STREAM_WINDOW_MAX + 1}, ValueError, "STREAM_WINDOW_MAX"),
        ({"window": 2.5}, TypeError, "number of items"),
        ({"window": True}, TypeError, "number of items"),
        ({"retry": 2}, TypeError, "trimesh.Retry"),
        ({"retry": Retry(2)}, TypeError, "idempotent=True"),
        ({"retries": 2}, TypeError, "retries"),
    ],
)
def test_option_that_means_nothing_is_refused_when_built(options: dict[str, Any], error: Any, text: str):
    with pytest.raises(error, match=text):
        handle("once").options(**options)


def test_generator_cannot_be_retried():
    with pytest.raises(TypeError, match="async generator"):
        handle("many").options(retry=Retry(1))


@rows(
    ("fields", "error"),
    [
        ({"max": 0}, ValueError),
        ({"max": True}, ValueError),
        ({"max": 1.5}, ValueError),
        ({"max": 1, "on": ()}, TypeError),
        ({"max": 1, "on": ("ProcDied",)}, TypeError),
        ({"max": 1, "on": KeyboardInterrupt}, TypeError),
        ({"max": 1, "backoff": -1.0}, ValueError),
        ({"max": 1, "backoff": float("nan")}, ValueError),
        ({"max": 1, "backoff": "soon"}, ValueError),
    ],
)
def test_retry_that_means_nothing_is_refused(fields: dict[str, Any], error: type[Exception]):
    with pytest.raises(error, match=r"Retry|backoff"):
        Retry(**fields)


def test_retry_counts_further_attempts():
    retry = Retry(2, on=ProcDied)
    assert [retry.wants(ProcDied(), attempt) for attempt in (1, 2, 3)] == [True, True, False]
    assert not retry.wants(ValueError(), 1)
    assert hash(retry) == hash(Retry(2))


def test_backoff_is_a_number_a_policy_or_a_function_of_the_attempt():
    assert [Retry(3, backoff=0.5).delay(attempt) for attempt in (1, 2)] == [0.5, 0.5]
    assert [Retry(3, backoff=lambda attempt: attempt / 4).delay(attempt) for attempt in (1, 2)] == [0.25, 0.5]
    backoff = Backoff(0.1, cap=0.3, factor=2, jitter=0.5)
    assert [Retry(3, backoff=backoff).delay(attempt) for attempt in (1, 2, 3)] == [0.1, 0.2, 0.3]
    assert Retry(3, backoff=backoff).delay(1, luck=1.0) == 0.05
    with pytest.raises(ValueError, match="backoff"):
        Retry(1, backoff=lambda attempt: -attempt).delay(1)


def test_options_add_up():
    first = handle("again").options(window=3)
    second = first.options(retry=Retry(1)).options(window=5)
    assert (first._options.window, first._options.retry) == (3, None)
    assert (second._options.window, second._options.retry) == (5, Retry(1))


def test_errors_of_all_attempts_are_context():
    """C6: the latest first, behind the last error's own context; told in a note, too."""
    own, last = KeyError("own"), ValueError("third")
    last.__context__ = own
    first, second = ProcDied("first"), ProcDied("second")
    assert with_earlier(last, [first, second]) is last
    with_earlier(last, [first, second])
    last.__notes__.pop()
    assert own.__context__ is second
    assert second.__context__ is first
    assert first.__context__ is None
    [note] = last.__notes__
    assert "attempt 3" in note
    assert "ProcDied: first; ProcDied: second" in note
    assert not hasattr(with_earlier(ValueError(), []), "__notes__")


def test_errors_that_end_several_attempts_are_linked_once():
    """C6: members whose deaths are known fail further attempts with the same error; earlier calls have linked some."""
    first, second, last = ValueError("first"), KeyError("second"), LookupError("last")
    with_earlier(second, [first])  # of another call
    assert with_earlier(first, [second]) is first
    assert (first.__context__, second.__context__) == (second, None)

    assert with_earlier(last, [first, second, first]) is last
    assert (last.__context__, first.__context__, second.__context__) == (first, second, None)
    assert with_earlier(first, [second, first, second]) is first
    assert (first.__context__, second.__context__) == (second, None)
