"""Names of parts of meshes: where they are, and what is left."""

from __future__ import annotations

from tests.rows import rows

from trimesh.shape.extent import Extent
from trimesh.shape.region import Region
from trimesh.shape.value_mesh import view_name

WHOLE = Region(Extent(hosts=2, gpus=4))


@rows(
    ("seen", "name"),
    [
        (WHOLE, "m{'hosts': 2, 'gpus': 4}"),
        (WHOLE.slice(hosts=1), "m[hosts=1]{'gpus': 4}"),
        (WHOLE.slice(gpus=2), "m[gpus=2]{'hosts': 2}"),
        (WHOLE.slice(hosts=1, gpus=3), "m[hosts=1,gpus=3]"),
        (WHOLE.slice(hosts=1).slice(gpus=slice(0, 2)), "m[hosts=1]{'gpus': 2}"),
        (WHOLE.flatten("ranks"), "m{'ranks': 8}"),
        (WHOLE.rename(gpus="tp"), "m{'hosts': 2, 'tp': 4}"),
        (WHOLE.rename(gpus="tp").slice(tp=3), "m[gpus=3]{'hosts': 2}"),
        (WHOLE.split(gpus=("dp", "tp"), tp=2).slice(dp=1, hosts=0), "m[hosts=0]{'tp': 2}"),
        (WHOLE.slice(gpus=slice(0, 0)), "m{'hosts': 2, 'gpus': 0}"),
    ],
)
def test_name_of_a_part(seen: Region, name: str) -> None:
    assert view_name("m", WHOLE, seen) == name


def test_members_beyond_a_mesh_that_has_grown() -> None:
    grown = Region(Extent(gpus=6))

    assert view_name("m", Region(Extent(gpus=4)), grown.slice(gpus=5)) == "m[gpus=5]"
    assert view_name("m", Region(Extent(gpus=4)), grown) == "m{'gpus': 6}"


def test_mesh_without_dimensions_is_its_name() -> None:
    assert view_name("m", Region(Extent()), Region(Extent())) == "m"
