"""Steps of a test: which of them a failure needs, what they are called, and the line that repeats it with those."""

from __future__ import annotations

import contextlib

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from tests.testing.actors import Worker, run_body

import trimesh
from trimesh.testing import simulate
from trimesh.testing.plans.plan import compact, expand
from trimesh.testing.running import ItemRun, RunSettings, SeedPlan, Simulated, run_simulated
from trimesh.testing.simulated.seeded_run import SeededOptions


def item(body, only: int | None = None, **settings) -> ItemRun:
    names = body.__code__.co_varnames[: body.__code__.co_argcount]
    simulated = Simulated(1, (), SeededOptions({"gpus": 2}))
    return ItemRun("tests/x.py::test_y", body, dict.fromkeys(names), simulated, RunSettings(SeedPlan(only), **settings))


async def full_of_steps(mesh, faults, chaos):
    """Fails when both 7 and 20 were sent, if the one fault that matters has been planned."""
    w = await mesh.spawn("w", Worker)
    faults.at(w.step, nth=1).delays(0.5)
    faults.at(w.items, nth=1).raises(KeyError("not that one"))
    faults.at(w.count, nth=1).raises(KeyError("the one that matters"))
    sent = set()
    for number in chaos.steps(40):
        await w.step.call(number)
        sent.add(number)
    with contextlib.suppress(trimesh.MeshErrorGroup):
        async with w.items.stream(1) as items:
            async for _ in items:
                pass
    if {7, 20} <= sent:
        await w.count.call()


@pytest.mark.slow
def test_report_says_which_steps_a_failure_needs_and_how_to_replay_them():
    run = item(full_of_steps)
    with pytest.raises(trimesh.MeshErrorGroup):
        run_simulated(run)

    ((_, text),) = run.sections
    assert "the smallest program of steps that fails so has 2 of 40:\n  s0.7: 7\n  s0.20: 20\n" in text
    line = "--mesh-seed=0x0 --mesh-leave-out=f0,f1,s0.0-6,s0.8-19,s0.21-39,s0.40-"
    assert line in text
    with pytest.raises(trimesh.MeshErrorGroup):
        run_simulated(item(full_of_steps, only=0, left_out=expand(line.rpartition("=")[2])))


def test_failure_without_any_step_says_so():
    async def body(chaos):
        for _ in chaos.steps(5):
            await trio.lowlevel.checkpoint()
        raise KeyError("whatever is done")

    run = item(body)
    with pytest.raises(KeyError):
        run_simulated(run)

    assert "it needs none of its 5 steps\n" in run.sections[0][1]
    assert "--mesh-leave-out=s0.0-4" in run.sections[0][1]


def test_steps_beyond_the_failure_take_no_place_of_others():
    async def body(chaos):
        for taken, _ in enumerate(chaos.steps(40), 1):
            await trio.lowlevel.checkpoint()
            assert taken < 5

    run = item(body)
    with pytest.raises(AssertionError):
        run_simulated(run)

    assert "the smallest program of steps that fails so has 5 of 5:\n  s0.0: 0\n" in run.sections[0][1]
    assert "--mesh-leave-out" not in run.sections[0][1]


def test_faults_that_the_spared_steps_needed_are_spared_with_them():
    async def body(mesh, faults, chaos):
        w = await mesh.spawn("w", Worker)
        for number in chaos.steps(range(6), "orders"):
            faults.at(w.step, {"gpus": 0}, nth=1).delays(0.1 * number + 0.1)
            await w.step.call(number)
            assert number != 3, "the third"

    run = item(body)
    with pytest.raises(AssertionError, match="the third"):
        run_simulated(run)

    assert (
        "it needs 0 of 4 faults\nthe smallest program of steps that fails so has 1 of 4:\n  orders.3: 3\n"
        in run.sections[0][1]
    )


@simulate(seeds=3)
async def test_steps_go_through_what_they_are_given(chaos):
    assert list(chaos.steps(3)) == [0, 1, 2]
    assert list(chaos.steps("ab")) == ["a", "b"]
    assert list(chaos.steps(iter(()), "none")) == []


def test_step_that_is_left_out_does_not_shift_the_others():
    taken = []

    async def body(chaos):
        taken.extend(chaos.steps("abcd", "letters"))
        taken.extend(chaos.steps(2))

    run_simulated(item(body, only=0, left_out=frozenset({"letters.1", "s1.0"})))

    assert taken == ["a", "c", "d", 1]


@pytest.mark.parametrize("name", ["", "two words", "f0", "c1", "s2", "a.b", "7", 3])
def test_wrong_name_of_a_series_is_refused(name):
    async def body(chaos):
        list(chaos.steps(3, name))

    error = run_body(body).error

    assert isinstance(error, ValueError)
    assert "buyers" in str(error)


def test_name_of_a_series_is_given_once():
    async def body(chaos):
        list(chaos.steps(3, "buyers"))
        list(chaos.steps(3, "buyers"))

    assert "got 'buyers' twice" in str(run_body(body).error)


def test_drawn_numbers_follow_from_seed_and_purpose():
    drawn: dict[tuple[int, str], float] = {}

    async def body(chaos):
        for purpose in "ab":
            drawn.setdefault((chaos.seed, purpose), chaos.draw("of", purpose).random())
            assert chaos.draw("of", purpose).random() == drawn[chaos.seed, purpose]

    for seed in (1, 2, 1):
        assert run_body(body, seed).error is None
    assert len(set(drawn.values())) == 4


# ---- keys ------------------------------------------------------------------------------------------------------------

KEYS = st.one_of(
    st.builds("f{}".format, st.integers(0, 30)),
    st.builds("{}.{}".format, st.sampled_from(["s0", "s1", "c0", "buyers", "b_2"]), st.integers(0, 30)),
)


@given(st.sets(KEYS))
def test_keys_survive_the_command_line(keys: set[str]):
    assert expand(compact(sorted(keys))) == keys


def test_neighbours_become_a_range():
    assert compact(["f0", "s0.3", "c0.1", "s0.1", "s0.2", "s0.12", "f1"]) == "f0,f1,s0.1-3,s0.12,c0.1"
    assert expand("") == frozenset()


@pytest.mark.parametrize("text", ["s0.5-3", "s0.0-99999999"])
def test_wrong_range_is_refused(text: str):
    with pytest.raises(ValueError, match=r"s0\.3-7"):
        expand(text)
