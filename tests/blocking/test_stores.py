"""Stores without `await`."""

from __future__ import annotations

from typing import Any

import trimesh.blocking as tb
from trimesh import Actor, endpoint
from trimesh.blocking.service import face, open_store


class User(Actor):
    @endpoint(thread=True)
    def keep(self, store: Any, key: str) -> bytes:
        """Use a handle in a thread of an actor."""
        face(store).put(key, b"kept by an actor")
        return face(store).get(key)  # type: ignore[no-any-return]


def test_stores_here_and_in_threads_of_actors() -> None:
    """K06."""
    with tb.spawn_procs({"gpus": 2}) as procs, open_store(procs, retain=2) as store:
        users = procs.spawn("users", User)
        assert users.slice(gpus=0).keep.call_one(store, "x") == b"kept by an actor"
        first = store.wait_newer("x")
        large = bytearray(b"1" * 100_000)
        second = store.put("x", large, ttl=1000)
        into = bytearray(len(large))
        assert store.get_into("x", into) == second == store.version("x")
        assert into == large == store.get("x")
        assert store.get("x", version=first) == b"kept by an actor"
        assert (store.keys("x"), store.delete("x"), store.keys()) == (["x"], True, [])
        assert store.statistics().puts == 2
