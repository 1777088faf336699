"""Reinforcement learning of a small transformer: generators, judges and a trainer that work at the same time.

Run it: python examples/grpo.py [--steps 80] [--seed 0] [--broken]

The model is to copy the digits of a prompt; the reward of an answer is the share of its digits that are right. Each
prompt is answered many times, and an answer is made likelier if it is better than the mean of its group (GRPO: group
relative policy optimization). Generators go on while the trainer trains: slots bound by how many versions what they
make is older than the weights that it trains, and a replay buffer holds it. On the way one generator is killed; its
requests are made again, and its successor takes the weights from the trainer.

With --broken the rewards of a group are shuffled before they are used: everything runs, nothing is learned.
"""

from __future__ import annotations

import argparse
import random
from collections import Counter
from typing import Any

import attrs
import torch
import trio
from torch import Tensor, nn

import trimesh
from trimesh import Actor, Backoff, ProcDied, Restart, Retry, endpoint, this_host
from trimesh.rdma import Published
from trimesh.service import Pool, ReplayBuffer, Slots, open_pool, open_replay, open_slots

DIGITS = 4
"""Different ones; the next number is the sign after which the answer begins."""

LENGTH = 3
"""Digits of a prompt, and of its answer."""

WIDTH = 32
PROMPTS = 8
"""Of one batch."""

ANSWERS = 16
"""To one prompt: a group."""

STALENESS = 1
"""Versions by which answers may be older than the weights that they train."""

WORKERS = 6
"""Groups that are on their way at once."""

CLIP = 0.2
"""How far the probability of a digit may move from that with which it was drawn, in one step."""

BOUND = 0.9
"""Mean reward that says that copying is learned; guessing gives 1 / DIGITS."""


class Policy(nn.Module):
    """A transformer of one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.digits = nn.Embedding(DIGITS + 1, WIDTH)
        self.places = nn.Embedding(2 * LENGTH, WIDTH)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.out = nn.Linear(WIDTH, DIGITS)

    def forward(self, text: Tensor) -> Tensor:
        """Return the logarithms of the probabilities of what comes after each place."""
        length = text.shape[1]
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        hidden = self.layer(self.digits(text) + self.places.weight[:length], src_mask=later)
        chances: Tensor = self.out(hidden).log_softmax(-1)
        return chances


@attrs.frozen
class Group:
    """The answers to one prompt.

    Attributes:
        prompt: Digits.
        answers: Digits of each answer.
        chances: Logarithm of the probability with which each of those was drawn.
        generator: Which replica has made them, and which of its processes (0 for the first).
        rewards: Of each answer.
        version: Of the weights when the work began.
    """

    prompt: list[int]
    answers: list[list[int]]
    chances: list[list[float]]
    generator: tuple[int, int]
    rewards: list[float] = attrs.field(factory=list[float])
    version: int = 0


@attrs.frozen
class Report:
    """What one step has come to: the new version, the mean reward of its batch, and the age of its oldest group."""

    version: int
    reward: float
    age: int


class Trainer(Actor):
    """Has the weights, and publishes them."""

    def __init__(self, seed: int, *, is_broken: bool) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(seed)
        self.is_broken = is_broken
        self.policy = Policy()
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=3e-3)
        self.published = Published()
        self.version = 0

    @endpoint
    async def publish(self) -> tuple[int, Published]:
        """Publish the weights; return their version, and the handle by which generators read them."""
        self.version = await self.published.publish(self.policy.state_dict())
        return self.version, self.published

    @endpoint
    async def step(self, buffer: ReplayBuffer[Group]) -> Report:
        """Train with one batch and publish the new weights."""
        async with buffer.taking(PROMPTS) as groups:  # if this process dies here, they are there for the next one
            age = self.version - min(group.version for group in groups)
            rewards = torch.tensor([group.rewards for group in groups])
            self.learn(groups, rewards[:, torch.randperm(ANSWERS)] if self.is_broken else rewards)
        self.version = await self.published.publish(self.policy.state_dict())
        return Report(self.version, rewards.mean().item(), age)

    def learn(self, groups: list[Group], rewards: Tensor) -> None:
        """Make the answers likelier that are better than the mean of their group."""
        advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-3)
        texts = torch.tensor([[*group.prompt, DIGITS, *answer] for group in groups for answer in group.answers])
        drawn_with = torch.tensor([chances for group in groups for chances in group.chances])
        chances = self.policy(texts[:, :-1])[:, LENGTH:].gather(2, texts[:, LENGTH + 1 :, None]).squeeze(2)
        ratios = (chances - drawn_with).exp()
        gains = advantages.view(-1, 1)
        loss = -torch.minimum(ratios * gains, ratios.clamp(1 - CLIP, 1 + CLIP) * gains).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


class Generator(Actor):
    """Answers prompts. The handle on the weights is all that it needs to begin, also after a restart."""

    def __init__(self, weights: Published) -> None:
        torch.set_num_threads(1)
        here = trimesh.context()
        self.name = (here.point["replica"], here.incarnation)
        torch.manual_seed(100 * self.name[0] + self.name[1])
        self.policy = Policy()
        self.weights = weights
        self.version = 0

    @endpoint(idempotent=True)
    async def pull(self, version: int) -> None:
        """Take the newest weights, of this version or of a later one."""
        while self.version < version:
            await self.weights.wait_newer(self.version)
            async with self.weights.pin() as snapshot:
                await snapshot.read_into(self.policy.state_dict())
            self.version = snapshot.version

    @endpoint(idempotent=True)
    async def generate(self, prompt: list[int]) -> Group:
        """Answer a prompt many times."""
        if self.version == 0:
            await self.pull(1)
        text = torch.tensor([[*prompt, DIGITS]] * ANSWERS)
        chances: list[Tensor] = []
        with torch.no_grad():
            for _ in range(LENGTH):
                after = self.policy(text)[:, -1]
                drawn = torch.multinomial(after.exp(), 1)
                chances.append(after.gather(1, drawn))
                text = torch.cat([text, drawn], 1)
        return Group(prompt, text[:, LENGTH + 1 :].tolist(), torch.cat(chances, 1).tolist(), self.name)


class Judge(Actor):
    """Scores answers."""

    @endpoint(concurrency=4, idempotent=True)
    async def score(self, prompt: list[int], answers: list[list[int]]) -> list[float]:
        """Return the share of right digits of each answer."""
        return [sum(map(int.__eq__, prompt, answer)) / LENGTH for answer in answers]


async def roll(
    dice: random.Random,
    generators: Pool[Generator],
    judges: Pool[Judge],
    slots: Slots,
    buffer: ReplayBuffer[Group],
    made: Counter[tuple[int, int]],
) -> None:
    """Make groups for ever, as the slots allow."""
    while True:
        async with slots.lease() as lease:
            group = await generators.generate([dice.randrange(DIGITS) for _ in range(LENGTH)])
            rewards = await judges.score(group.prompt, group.answers)
            await buffer.add(attrs.evolve(group, rewards=rewards, version=lease.version), version=lease.version)
            made[group.generator] += 1


SURVIVE = Retry(10, on=(ProcDied,))
HEALED: dict[str, Any] = {"supervision": Restart("one_for_one", backoff=Backoff(0.01))}


async def main(steps: int = 80, seed: int = 0, *, is_broken: bool = False) -> None:
    """Train, kill a generator on the way, and show what was learned and that every piece of work is accounted for."""
    reports: list[Report] = []
    made: Counter[tuple[int, int]] = Counter()
    async with (
        this_host().warm(preload=("torch", "torch._dynamo")) as host,  # what optimizers import
        host.spawn_procs({}, name="training") as training,
        host.spawn_procs({"replica": 2}, name="generation", **HEALED) as generation,
        host.spawn_procs({"replica": 2}, name="judgement") as judgement,
    ):
        trainer = await training.spawn("trainer", Trainer, seed, is_broken=is_broken)
        version, weights = await trainer.publish.call_one()
        generators = await generation.spawn("generators", Generator, weights)
        async with (
            open_pool(generators, concurrency=1) as pool,
            open_pool(await judgement.spawn("judges", Judge), concurrency=4) as judges,
            open_slots(batch=PROMPTS, staleness=STALENESS, version=version) as slots,
            open_replay(capacity=100, slots=slots) as buffer,
            trio.open_nursery() as nursery,
        ):
            for worker in range(WORKERS):
                dice = random.Random(f"{seed}/{worker}")
                nursery.start_soon(roll, dice, pool, judges, slots, buffer, made)
            for step in range(1, steps + 1):
                reports.append(await trainer.step.call_one(buffer))
                async with pool.paused("keep"):  # what runs goes on, nothing begins
                    await generators.pull.options(retry=SURVIVE).call(reports[-1].version)  # waits for who is down
                await slots.advance(version=reports[-1].version)
                if step % 10 == 0:
                    print(f"step {step:4}  reward {mean_reward(reports):.2f}  oldest {reports[-1].age} versions")
                if step == steps // 3:
                    await trio.sleep(0.005)  # the generators are at work by then
                    await generation.kill([{"replica": 1}])
                    print(f"step {step:4}  generator 1 was killed")
            nursery.cancel_scope.cancel()
        requests, items, places = pool.statistics(), buffer.statistics(), slots.statistics()
    ends = requests.succeeded + requests.failed + requests.cancelled
    print(f"generators made {dict(sorted(made.items()))} groups, by replica and process")
    print(f"requests: {requests.made} made, {ends} ended, {requests.retried} of them made again after a death")
    gone = sum(items.evicted.values())
    print(f"groups: {items.added} added, {items.taken} trained, {items.stored} stored, {gone} evicted")
    print(f"slots: {places.begun} begun, {places.handed_on} handed on, {places.returned} returned")
    assert requests.made == ends
    assert items.added == items.taken + items.stored + gone
    assert places.begun == places.handed_on + places.returned
    assert max(report.age for report in reports) <= STALENESS
    reward = mean_reward(reports)
    print(f"reward {reward:.2f}: copying is {'learned' if reward >= BOUND else 'not learned'}, the bound is {BOUND}")


def mean_reward(reports: list[Report]) -> float:
    """Return the mean reward of the newest ten steps."""
    newest = [report.reward for report in reports[-10:]]
    return sum(newest) / len(newest)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=80, help="of training (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and prompts (default: %(default)s)")
    parser.add_argument("--broken", action="store_true", help="shuffle the rewards of each group")
    options = parser.parse_args()
    trio.run(lambda: main(options.steps, options.seed, is_broken=options.broken))
