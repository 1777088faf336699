"""Log records with the coordinates of the code that made them."""

from __future__ import annotations

import logging
from typing import Any

import msgspec

from trimesh import Actor, endpoint, observe, this_host
from trimesh.testing import simulate


class Speaker(Actor):
    @endpoint
    def log(self, **extra: object) -> tuple[dict[str, Any], str, str]:
        """Return the coordinates of a record of this endpoint, and what the formatters make of it."""
        record = logging.makeLogRecord(
            {"msg": "loss %.1f", "args": (0.5,), "levelname": "INFO", "name": "train", **extra}
        )
        assert observe.Coordinates().filter(record) is True
        fields = ("member", "mesh", "point", "endpoint", "incarnation")
        found = {name: vars(record)[name] for name in fields}
        return found, observe.LogFormatter().format(record), observe.JsonLogFormatter().format(record)


@simulate(seeds=1)
async def test_records_of_an_endpoint_have_its_coordinates():
    """In each dimension; also in a part of the mesh."""
    async with this_host().spawn_procs({"hosts": 2, "gpus": 3}) as procs:
        speakers = await procs.spawn("speakers", Speaker)
        said = await speakers.slice(hosts=1).log.call(step=3, odd={1})
    for rank, (found, text, encoded) in enumerate(said.values()):
        point = {"hosts": 1, "gpus": rank}
        member = f"speakers[hosts=1,gpus={rank}].log"
        assert found == {"member": member, "mesh": "speakers", "point": point, "endpoint": "log", "incarnation": 0}
        assert list(found["point"]) == ["hosts", "gpus"]
        assert text.endswith(f" INFO {member} train: loss 0.5")
        decoded = msgspec.json.decode(encoded)
        assert {name: decoded[name] for name in ("member", "mesh", "point", "endpoint")} == {
            name: found[name] for name in ("member", "mesh", "point", "endpoint")
        }
        assert (decoded["step"], decoded["odd"]) == (3, [1])


def test_records_outside_of_actors_and_odd_values() -> None:
    """An error is there with its traceback, a value that JSON does not know as its `repr`; newlines stay inside."""
    formatter = observe.JsonLogFormatter()
    try:
        raise ValueError("a\nb")
    except ValueError as error:
        record = logging.makeLogRecord({"msg": "no\n%s", "args": ("way",), "exc_info": (ValueError, error, None)})
    record.thing, record.created, record.process = formatter, 0.5, 7
    record.levelname, record.name, record.stack_info = "INFO", "train", "Stack (most recent call last):\n  here"
    line = formatter.format(record)
    assert "\n" not in line
    assert msgspec.json.decode(line) == {
        "time": "1970-01-01T00:00:00.500000+00:00",
        "level": "INFO",
        "logger": "train",
        "message": "no\nway",
        "pid": 7,
        "member": "-",
        "incarnation": 0,
        "thing": repr(formatter),
        "exception": "ValueError: a\nb",
        "stack": "Stack (most recent call last):\n  here",
    }
    assert vars(record)["point"] == {}
    short = observe.LogFormatter("%(member)s %(mesh)s|%(endpoint)s|%(asctime)s", datefmt="%Y").format(record)
    assert short.startswith("- ||19")
    assert " INFO - train: no\nway" in observe.LogFormatter().format(record)


def test_record_that_has_coordinates_keeps_them() -> None:
    """They are those of the task that made it, whatever task formats it."""
    copied = logging.makeLogRecord({"msg": "", "member": "set before"})
    assert observe.Coordinates().filter(copied) is True
    assert (vars(copied)["member"], "mesh" in vars(copied)) == ("set before", False)
    assert msgspec.json.decode(observe.JsonLogFormatter().format(copied))["member"] == "set before"
