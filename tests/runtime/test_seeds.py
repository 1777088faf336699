"""What the generators of a process start from, and that modules which are imported late get it, too."""

from __future__ import annotations

import importlib
import importlib.util
import random
import subprocess
import sys
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import pytest

from trimesh._runtime.system.seeds import ProcSeeds, when_imported


def test_the_rule_is_the_documented_one() -> None:
    """docs/guide.md promises it."""
    source = random.Random("7 procs 2 1")

    seeds = ProcSeeds.of(7, "procs", 2, 1)

    assert (seeds.python, seeds.numpy, seeds.torch) == (
        source.getrandbits(64),
        source.getrandbits(32),
        source.getrandbits(63),
    )


def test_seeds_do_not_collide_where_sums_would() -> None:
    """(1, 2, 3) and (1, 23, 0) are different processes, and so are those of meshes with other names."""
    places = [(1, "m", 2, 3), (1, "m", 23, 0), (12, "m", 3, 0), (0, "m", 0, 0), (0, "n", 0, 0)]

    assert len({ProcSeeds.of(*place) for place in places}) == len(places)


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module that nobody has imported yet; its code fails while FAIL is set in the environment."""
    (tmp_path / "watched_once.py").write_text("import os\nassert 'FAIL' not in os.environ\nvalue = 1\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    finders = list(sys.meta_path)
    yield "watched_once"
    sys.modules.pop("watched_once", None)
    assert sys.meta_path == finders


def test_an_action_waits_for_the_import_and_comes_once(module: str) -> None:
    """After the module's own code has run; the finder goes with its last name."""
    seen: list[ModuleType] = []
    when_imported(module, lambda found: seen.append(found.value))
    assert seen == []

    found = importlib.import_module(module)

    assert seen == [1]
    importlib.reload(found)
    assert seen == [1]


def test_an_action_comes_at_once_for_what_is_loaded(module: str) -> None:
    """Nothing is left to wait for."""
    importlib.import_module(module)
    seen: list[ModuleType] = []

    when_imported(module, seen.append)

    assert len(seen) == 1


def test_an_import_that_fails_is_waited_for_again(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The action comes with the import that succeeds."""
    seen: list[ModuleType] = []
    when_imported(module, seen.append)
    monkeypatch.setenv("FAIL", "1")
    with pytest.raises(AssertionError):
        importlib.import_module(module)
    assert seen == []
    monkeypatch.delenv("FAIL")

    importlib.import_module(module)

    assert len(seen) == 1


def test_looking_for_a_module_does_not_count_as_its_import(module: str) -> None:
    """Libraries ask `find_spec` whether torch is there; the loader that they see is the module's own."""
    seen: list[ModuleType] = []
    when_imported(module, seen.append)

    spec = importlib.util.find_spec(module)

    assert spec is not None
    assert type(spec.loader) is SourceFileLoader
    assert seen == []
    found = importlib.import_module(module)
    assert seen == [found]
    assert found.__spec__ is not None
    assert vars(found.__spec__.loader).keys() == {"name", "path"}


LATE = """
import random, sys
from trimesh._runtime.system.seeds import ProcSeeds
seeds = ProcSeeds.of(7, "m", 0, 0)
seeds.plant()
assert "numpy" not in sys.modules and "torch" not in sys.modules
"""
needs_numpy = pytest.mark.skipif(importlib.util.find_spec("numpy") is None, reason="numpy is not installed")


def run(program: str) -> list[str]:
    """Return the words that a new interpreter prints, whose generators were seeded before numpy and torch came."""
    command = [sys.executable, "-c", LATE + program]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.split()


def test_the_generator_of_the_standard_library_is_seeded_at_once() -> None:
    """It is loaded in every process."""
    assert run("print(random.random() == random.Random(seeds.python).random())") == ["True"]


@needs_numpy
def test_numpy_is_seeded_when_it_is_imported() -> None:
    """Whether its generator is loaded with it or at its first use."""
    assert run("import numpy; print(numpy.random.random() == numpy.random.RandomState(seeds.numpy).random())") == [
        "True"
    ]


@pytest.mark.slow
@pytest.mark.torch
def test_torch_is_seeded_when_it_is_imported() -> None:
    """And a seed that the program sets afterwards stands."""
    program = "import torch; print(torch.initial_seed() == seeds.torch); torch.manual_seed(5)"

    assert run(f"{program}; import torch; print(torch.initial_seed())") == ["True", "5"]


@needs_numpy
def test_forked_children_are_not_seeded_alike() -> None:
    """Each would import numpy for itself, and all would draw the same."""
    fork = "import os; child = os.fork(); os.waitpid(child, 0) if child else None"

    drawn = run(f"{fork}; import numpy; print(numpy.random.random(), flush=True)")

    assert len(set(drawn)) == 2
