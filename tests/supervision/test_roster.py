"""`Roster`: what a reader is told is what has changed, whenever it looks."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from trimesh._supervision.policy import Roster

RANKS = st.sets(st.integers(0, 4), min_size=1)
STEPS = st.lists(st.tuples(st.sampled_from(["join", "leave", "look"]), RANKS), max_size=40)


@given(STEPS)
def test_reader_that_adds_up_what_it_is_told_knows_who_is_there(steps: list[tuple[str, set[int]]]):
    """RO-1 to RO-3, against plain sets."""
    roster, there, seen, known = Roster(), dict[int, int](), dict[int, int](), dict[int, int]()
    reasons: dict[tuple[int, int], Exception] = {}
    last: dict[int, int] = {}
    for number, (step, ranks) in enumerate(steps):
        epoch = roster.epoch
        if step == "join":
            news = {rank: last.get(rank, -1) + 1 for rank in ranks if rank not in there}
            last |= news
            there |= news
            assert roster.join(news) == bool(news)
            assert roster.epoch == epoch + bool(news)
        elif step == "leave":
            why = KeyError(number)
            gone = [rank for rank in ranks if rank in there]
            assert roster.leave(ranks, why) == bool(gone)
            reasons |= {(rank, there.pop(rank)): why for rank in gone}
            assert roster.epoch == epoch + bool(gone)
        else:
            change = roster.since(seen)
            assert change.epoch == epoch == roster.epoch
            for rank, incarnation, _ in change.left:
                assert known.pop(rank) == incarnation
            for rank, incarnation in change.joined.items():
                assert rank not in known
                known[rank] = incarnation
            seen = dict(roster.present)
            assert known == seen == there
            assert all(_is_known(reasons, one) for one in change.left)
        assert roster.present == there


def _is_known(reasons: dict[tuple[int, int], Exception], left: tuple[int, int, Exception]) -> Any:
    """A place that was left twice between two looks tells the last reason; the first one has been left before that."""
    rank, incarnation, why = left
    return why in [one for (place, number), one in reasons.items() if place == rank and number >= incarnation]
