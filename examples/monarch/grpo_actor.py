"""Monarch's grpo_actor: generators, a scorer and a learner, each an asyncio program, around a queue and a buffer.

Generators draw a group of actions for a state, the scorer rewards them, the learner takes a step of clipped policy
gradients on groups of its buffer, and generators read the new weights out of the learner's memory. What is drawn with
old weights counts by the ratio of both policies. Its reward, unlike there, has something to learn: the best action of
a state is the number of its largest entry.

Run it: python examples/monarch/grpo_actor.py [--steps 60] [--generators 2] [--device cuda]
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections import deque

import attrs
import torch
from torch import nn
from torch.distributions import Categorical, kl_divergence

import trimesh
from trimesh import RDMABuffer, current_rank, endpoint

GROUP = 16
STATES = ACTIONS = 4


@attrs.frozen
class Trajectory:
    """What a generator has drawn for a state.

    Attributes:
        version: Of its weights.
        state: A vector of `STATES` numbers.
        actions: `GROUP` of them.
        logps: Their log probabilities when they were drawn.
        rewards: Given by the scorer.
    """

    version: int
    state: torch.Tensor
    actions: torch.Tensor
    logps: torch.Tensor
    rewards: torch.Tensor | None = None


def new_policy(device: str) -> nn.Sequential:
    """Return a policy that knows nothing."""
    return nn.Sequential(nn.Linear(STATES, 32), nn.Tanh(), nn.Linear(32, ACTIONS)).to(device)


class TrajectoryQueue(trimesh.aio.Actor):
    """Between generators and the scorer."""

    def __init__(self, capacity: int) -> None:
        self.queue: asyncio.Queue[Trajectory] = asyncio.Queue(capacity)

    @endpoint(concurrency=16, group="put")
    async def put(self, trajectory: Trajectory) -> None:
        """Add one, when there is room."""
        await self.queue.put(trajectory)

    @endpoint(concurrency=4, group="get")
    async def get(self) -> Trajectory:
        """Take one, when there is one."""
        return await self.queue.get()


class ReplayBuffer(trimesh.aio.Actor):
    """The latest trajectories with rewards; newer ones are drawn more often."""

    def __init__(self, capacity: int) -> None:
        self.kept: deque[Trajectory] = deque(maxlen=capacity)
        self.has_some = asyncio.Event()

    @endpoint(concurrency=16, group="put")
    async def put(self, trajectory: Trajectory) -> None:
        """Add one in place of the oldest."""
        self.kept.append(trajectory)
        self.has_some.set()

    @endpoint(group="sample")
    async def sample(self, count: int) -> list[Trajectory]:
        """Draw some, with repeats; wait until there is one. The caller's deadline is the time limit."""
        await self.has_some.wait()
        return random.choices(self.kept, weights=[1 + one.version for one in self.kept], k=count)


class Scorer(trimesh.aio.Actor):
    """Rewards what is in the queue, and puts it into the buffer."""

    def __init__(self, queue: TrajectoryQueue, buffer: ReplayBuffer) -> None:
        self.queue = queue
        self.buffer = buffer
        self.scored = 0

    @endpoint
    async def run(self) -> None:
        """Work until cancelled."""
        while True:
            one = await self.queue.get.call_one()
            rewards = (one.actions == one.state.argmax()).float()
            await self.buffer.put.call_one(attrs.evolve(one, rewards=rewards))
            self.scored += 1

    @endpoint(group="watch")
    async def count(self) -> int:
        """Return how many trajectories have a reward."""
        return self.scored


class Learner(trimesh.aio.Actor):
    """Has the policy, and trains it."""

    def __init__(self, buffer: ReplayBuffer, batch: int, device: str) -> None:
        torch.manual_seed(0)
        self.device = device
        self.buffer = buffer
        self.batch = batch
        self.policy = new_policy(device)
        self.reference = new_policy(device).requires_grad_(requires_grad=False)
        self.reference.load_state_dict(self.policy.state_dict())
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=0.02)
        self.version = 0

    @endpoint
    async def weights(self) -> dict[str, RDMABuffer]:
        """Return handles on the weights, by which others read them where they are."""
        return {name: RDMABuffer(value.view(-1)) for name, value in self.policy.state_dict().items()}

    @endpoint
    async def step(self) -> tuple[int, float, float]:
        """Take a step; return the version of the weights, the loss, and the mean reward of the batch."""
        drawn = await self.buffer.sample.call_one(self.batch)
        states = torch.stack([one.state for one in drawn]).repeat_interleave(GROUP, 0).to(self.device)
        actions = torch.cat([one.actions for one in drawn]).to(self.device)
        logps = torch.cat([one.logps for one in drawn]).to(self.device)
        rewards = torch.stack([one.rewards for one in drawn if one.rewards is not None]).to(self.device)
        advantages = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-6)).flatten()

        now = Categorical(logits=self.policy(states))
        ratio = (now.log_prob(actions) - logps).exp()
        gain = torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
        distance = kl_divergence(now, Categorical(logits=self.reference(states))).mean()
        loss = 0.01 * distance - gain
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.policy.parameters(), 1.0)
        self.optimizer.step()
        self.version += 1
        return self.version, loss.item(), rewards.mean().item()


class Generator(trimesh.aio.Actor):
    """Draws with a copy of the policy, which it updates between two draws."""

    def __init__(self, weights: dict[str, RDMABuffer], queue: TrajectoryQueue, device: str) -> None:
        torch.manual_seed(1 + current_rank())
        self.device = device
        self.policy = new_policy(device)
        self.weights = weights
        self.queue = queue
        self.version = 0
        self.lock = asyncio.Lock()

    @endpoint(concurrency=4)
    async def generate(self, count: int) -> None:
        """Draw groups for so many states."""
        for _ in range(count):
            state = torch.randn(STATES)
            async with self.lock:
                with torch.no_grad():
                    policy = Categorical(logits=self.policy(state.to(self.device)).expand(GROUP, -1))
                    actions = policy.sample()
                    drawn = Trajectory(self.version, state, actions.cpu(), policy.log_prob(actions).cpu())
            await self.queue.put.call_one(drawn)  # waits while the scorer is behind

    @endpoint(concurrency=4)
    async def update(self, version: int) -> None:
        """Read the weights of the learner."""
        async with self.lock:
            for name, value in self.policy.state_dict().items():
                await self.weights[name].read_into(value.view(-1))
            self.version = version


async def main(steps: int, generators: int, device: str) -> None:
    async with (
        trimesh.aio.spawn_procs({"gpus": 1}, name="learning", preload=("torch",)) as learning,
        trimesh.aio.spawn_procs({"gpus": generators}, name="generating", preload=("torch",)) as generating,
    ):
        queue = await learning.spawn("queue", TrajectoryQueue, 4 * generators)
        buffer = await learning.spawn("buffer", ReplayBuffer, 32 * generators)
        scorer = await learning.spawn("scorer", Scorer, queue, buffer)
        learner = await learning.spawn("learner", Learner, buffer, 8, device)
        team = await generating.spawn("generators", Generator, await learner.weights.call_one(), queue, device)

        async with asyncio.TaskGroup() as group:
            scoring = scorer.run.call_one.start_in(group)
            await team.update.call(0)
            await team.generate.call(4)
            for step in range(steps):
                async with asyncio.timeout(30):  # cancels both over there, too
                    _, (version, loss, reward) = await asyncio.gather(team.generate.call(4), learner.step.call_one())
                    await team.update.call(version)
                if step % 10 == 0 or step == steps - 1:
                    print(f"step {step:3}  loss {loss:+.3f}  reward {reward:.2f}")
            print(f"trajectories scored: {await scorer.count.call_one()}")
            scoring.cancel("the training is over")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="of the learner (default: %(default)s)")
    parser.add_argument("--generators", type=int, default=2, help="processes that draw (default: %(default)s)")
    parser.add_argument("--device", default="cpu", help='"cpu" or "cuda" (default: %(default)s)')
    options = parser.parse_args()
    asyncio.run(main(options.steps, options.generators, options.device))
