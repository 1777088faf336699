"""Ways of an operator and of a fetch through the controller; see `tests.test_ways`."""

from __future__ import annotations

import pytest
from tests.test_ways import fits, shortest

import trimesh
from trimesh import this_host

torch = pytest.importorskip("torch", reason="torch is an extra")

pytestmark = [pytest.mark.real, pytest.mark.torch]


async def test_operator_and_fetch() -> None:
    async with this_host().spawn_procs({"gpus": 1}) as procs:
        with procs.activate():
            one, other = torch.ones(4, 4), torch.ones(4, 4)

            async def multiply() -> None:
                one @ other

            product = one @ other
            operator = await shortest(multiply)
            fetch = await shortest(lambda: trimesh.fetch(product))

    assert fits(operator, functions=9, modules=4, calls=11), operator
    assert fits(fetch, functions=46, modules=20, calls=56), fetch
