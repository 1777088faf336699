"""`Region.spans` and `Region.resized`: views of a mesh whose first dimension grows and shrinks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.shape.test_region import seen, whole

from trimesh.shape.region import Region


@given(st.data())
def test_resized_view_shows_the_same_places_and_ranks(data: st.DataObject):
    """A view that spans the first dimension keeps its ranks as that grows, and is itself again when it shrinks."""
    size, inner, wide = (data.draw(st.integers(1, 4)) for _ in range(3))
    base = whole(replica=size, gpus=inner, tp=wide)
    view = data.draw(
        st.sampled_from(
            [
                base,
                base.slice(gpus=0),
                base.slice(tp=slice(0, None, 2)),
                base.slice(gpus=inner - 1, tp=wide - 1),
                base.rename(gpus="devices"),
            ]
        )
    )
    view = view.exclude_ranks(data.draw(st.sets(st.sampled_from(list(view.ranks())))))
    assert view.spans("replica")
    more = data.draw(st.integers(size, 6))
    grown = view.resized("replica", more)
    assert grown.spans("replica")
    assert dict(grown.extent) == {**view.extent, "replica": more}
    assert seen(grown)[: len(view)] == seen(view)
    assert [rank for rank in grown.ranks() if rank < base.base.nelements] == list(view.ranks())
    assert all(dict(point).get("replica", 0) == rank // (inner * wide) for point, rank in seen(grown))
    assert grown.resized("replica", size) == view


@pytest.mark.parametrize(
    "view",
    [
        whole(replica=3, gpus=2).slice(replica=0),
        whole(replica=3, gpus=2).slice(replica=slice(0, 2)),
        whole(replica=3, gpus=2).flatten("replica"),
        whole(replica=3, gpus=2).rename(replica="all"),
        whole(gpus=2, replica=3),
        whole(gpus=2),
    ],
)
def test_view_of_a_part_does_not_span(view: Region):
    assert not view.spans("replica")
