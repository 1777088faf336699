"""A suite to start from: a reinforcement-learning loop that survives the loss of its generators, and its tests.

    generators --rollouts--> reward model --scores--> trainer --weights--> generators

Generators answer prompts by the weights of the trainer, a reward model scores the answers, the trainer moves the
weights. The loop is plain Python, so that it runs anywhere; the shape is that of the real thing. What makes it survive:

- generators and reward models hold nothing whose loss matters: `Restart` brings them back, empty;
- a rollout says which version of the weights it wants, and a generator that has not got it asks the trainer. One that
  was restarted catches up in the same way as one that is merely behind;
- a rollout may run twice (`idempotent=True`): it draws from a seed of its own, so the second is like the first;
- the trainer holds what must not be lost. It lives in a mesh of its own, whose policy is `FailFast`: its death ends the
  loop with an error that names it, and whoever runs the loop begins again from a checkpoint.

Run it with `pytest examples/test_rl_loop.py`.
"""

from __future__ import annotations

import math
import random
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any

import attrs
import pytest
import trio

import trimesh
from trimesh import Actor, Backoff, ProcDied, Restart, Retry, endpoint, this_host
from trimesh.testing import simulate

PROMPTS = 4
ANSWERS = 3
SAMPLES = 4
"""Rollouts of each prompt in one step."""

Weights = list[list[float]]
"""The policy: a score for each answer to each prompt."""


def right_answer(prompt: int) -> int:
    """Return what the policy has to learn."""
    return (3 * prompt + 1) % ANSWERS


def probabilities(scores: list[float]) -> list[float]:
    """Return how likely each answer is (softmax)."""
    powers = [math.exp(score) for score in scores]
    return [power / sum(powers) for power in powers]


@attrs.frozen
class Request:
    """What a generator is asked for.

    Attributes:
        version: Of the weights.
        prompt: What to answer.
        sample: Which of several answers to the same prompt: it seeds the dice.
    """

    version: int
    prompt: int
    sample: int


@attrs.frozen
class Rollout:
    """One answer, and who has given it."""

    request: Request
    answer: int
    incarnation: int


# ---- the actors ------------------------------------------------------------------------------------------------------


class Trainer(Actor):
    """Holds the weights."""

    def __init__(self) -> None:
        self.version = 0
        self.policy: Weights = [[0.0] * ANSWERS for _ in range(PROMPTS)]

    @endpoint
    async def weights(self) -> tuple[int, Weights]:
        """Return the version and the weights."""
        return self.version, self.policy

    @endpoint
    async def step(self, rollouts: list[Rollout], rewards: list[float]) -> int:
        """Make answers with a better reward than the mean likelier (REINFORCE); return the new version."""
        mean = sum(rewards) / len(rewards)
        before = [probabilities(scores) for scores in self.policy]
        for rollout, reward in zip(rollouts, rewards, strict=True):
            prompt = rollout.request.prompt
            for answer in range(ANSWERS):
                is_chosen = answer == rollout.answer
                self.policy[prompt][answer] += (reward - mean) * (is_chosen - before[prompt][answer])
        self.version += 1
        return self.version


class Generator(Actor):
    """Answers prompts. Its handle on the trainer is all that it needs to begin, also the second time."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.version, self.policy = -1, Weights()

    @endpoint(idempotent=True)
    async def rollout(self, request: Request) -> Rollout:
        """Answer one prompt by the weights of the wanted version."""
        if self.version != request.version:
            self.version, self.policy = await self.trainer.weights.call_one()
        await trio.sleep(0.01)  # what a real model takes its time for
        dice = random.Random(f"{request.version}/{request.prompt}/{request.sample}")
        [answer] = dice.choices(range(ANSWERS), probabilities(self.policy[request.prompt]))
        return Rollout(request, answer, trimesh.context().incarnation)


class RewardModel(Actor):
    """Scores answers."""

    @endpoint(concurrency=8, idempotent=True)
    async def score(self, rollout: Rollout) -> float:
        """Return the reward of an answer."""
        return float(rollout.answer == right_answer(rollout.request.prompt))


# ---- the loop --------------------------------------------------------------------------------------------------------

SURVIVE = Retry(10, on=(ProcDied,))


@attrs.define(eq=False)
class Loop:
    """The loop, as its controller sees it.

    Attributes:
        generators, rewards, trainer: Meshes of actors.
        rollouts: Of all steps.
        mean_rewards: One for each step.
    """

    generators: Any
    rewards: Any
    trainer: Any
    rollouts: list[Rollout] = attrs.field(factory=list[Rollout])
    mean_rewards: list[float] = attrs.field(factory=list[float])

    async def run(self, steps: int, on_step: Callable[[int], object] = lambda step: None) -> Weights:
        """Make some steps; return the weights. `on_step` is called when the generators are at work."""
        version, _ = await self.trainer.weights.call_one()
        for step in range(steps):
            wanted = [Request(version, prompt, sample) for prompt in range(PROMPTS) for sample in range(SAMPLES)]
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.call_later, on_step, step)
                rollouts = await self.each(self.generators.rollout, wanted)
            rewards = await self.each(self.rewards.score, rollouts)
            version = await self.trainer.step.call_one(rollouts, rewards)
            self.rollouts += rollouts
            self.mean_rewards.append(sum(rewards) / len(rewards))
        _, weights = await self.trainer.weights.call_one()
        return weights

    async def each(self, verb: Any, items: list[Any]) -> list[Any]:
        """Return the results of some items in their order, whoever has computed them, however often it took."""
        found: dict[int, Any] = {}
        async with verb.options(retry=SURVIVE).map(items) as results:
            async for index, result in results:
                assert index not in found
                found[index] = result
        return [found[index] for index in range(len(items))]

    async def call_later(self, on_step: Callable[[int], object], step: int) -> None:
        """Let the generators begin first."""
        await trio.sleep(0.015)
        on_step(step)


@asynccontextmanager
async def open_loop(mesh: Any, **options: Any) -> AsyncGenerator[Loop, None]:
    """Put the trainer into a process of its own, and the others on the processes of `mesh`."""
    async with this_host().spawn_procs({}, name="training", **options) as training:
        trainer = await training.spawn("trainer", Trainer)
        generators = mesh.slice(gpus=slice(0, 3)).spawn("generators", Generator, trainer)
        async with generators as generators, mesh.slice(gpus=3).spawn("rewards", RewardModel) as rewards:
            yield Loop(generators, rewards, trainer)


async def undisturbed(mesh: Any, steps: int) -> Weights:
    """Return the weights that so many steps come to when nothing happens."""
    async with open_loop(mesh) as loop:
        return await loop.run(steps)


# ---- the tests -------------------------------------------------------------------------------------------------------

both = pytest.mark.mesh_backend("sim", "proc")
"""The same body over simulated schedules, and once over real processes."""

MESH: dict[str, Any] = {
    "per_host": {"gpus": 4},
    "supervision": Restart("one_for_one", intensity=100, period=60, backoff=Backoff(0.01, cap=1)),
}


@both
@simulate(seeds=5, **MESH)
async def test_policy_learns(mesh):
    async with open_loop(mesh) as loop:
        await loop.run(20)

    assert loop.mean_rewards[0] <= 0.5
    assert sum(loop.mean_rewards[-5:]) / 5 > 0.9


@both
@simulate(seeds=5, **MESH)
async def test_loop_survives_the_loss_of_a_generator(mesh, faults):
    """The weights are those of an undisturbed run: no rollout is lost, none counts twice."""
    expected = await undisturbed(mesh, 6)

    async with open_loop(mesh) as loop:
        weights = await loop.run(6, lambda step: faults.kill(mesh.slice(gpus=1)) if step == 2 else None)
        lives = await loop.generators.rollout.call(Request(version=6, prompt=0, sample=0))  # waits for whoever is down

    assert weights == expected
    assert [rollout.incarnation for rollout in lives.values()] == [0, 1, 0]  # it has come back, and has caught up
    assert len({rollout.answer for rollout in lives.values()}) == 1


@both
@simulate(seeds=5, **MESH)
async def test_rollout_whose_answer_was_lost_is_made_again(mesh, faults, fault_log):
    """The generator has done its work, and dies before it has said so."""
    expected = await undisturbed(mesh, 4)

    async with open_loop(mesh) as loop:
        faults.call(loop.generators.rollout, {"gpus": 2}).lose("reply", nth=5)
        weights = await loop.run(4)

    assert weights == expected
    assert len(fault_log) == 1


@simulate(seeds=5, **MESH)
async def test_loop_without_its_trainer_ends_with_an_error_that_names_it(mesh, faults):
    with pytest.RaisesGroup(ProcDied, flatten_subgroups=True) as caught:
        async with this_host().spawn_procs({}, name="training") as training:
            trainer = await training.spawn("trainer", Trainer)
            generators = await mesh.slice(gpus=slice(0, 3)).spawn("generators", Generator, trainer)
            rewards = await mesh.slice(gpus=3).spawn("rewards", RewardModel)
            loop = Loop(generators, rewards, trainer)
            await loop.run(6, lambda step: faults.kill(training) if step == 2 else None)

    [error] = trimesh.leaves(caught.value)
    assert trimesh.origin(error).mesh == "training"


@simulate(seeds=10, sometimes=("a generator was lost", "nothing was lost"), **MESH)
async def test_loop_comes_to_the_same_weights_whatever_happens(mesh, chaos):
    """Deaths, stops and delays at any moment, also of the reward model, make it late, not wrong."""
    expected = await undisturbed(mesh, 6)

    async with open_loop(mesh) as loop:
        plan = chaos.plan(kill=2, stop=1, lag=1, every=(0.02, 0.3), max_down=2)
        async with chaos.safety(plan, duration=600):
            weights = await loop.run(6)

    assert weights == expected
    was_lost = any(rollout.incarnation for rollout in loop.rollouts)
    chaos.sometimes("a generator was lost", was_lost)
    chaos.sometimes("nothing was lost", not was_lost)
