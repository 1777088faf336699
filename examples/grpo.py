"""Reinforcement learning of a small transformer: generators, judges and a trainer that work at the same time.

Run it: python examples/grpo.py [--steps 80] [--seed 0] [--staleness 1] [--broken] [--asyncio]
                                [--checkpoint FOLDER [--die-after STEP]], then [--checkpoint FOLDER --resume]

The model is to copy the digits of a prompt; the reward of an answer is the share of its digits that are right. Each
prompt is answered many times, and an answer is made likelier if it is better than the mean of its group (GRPO: group
relative policy optimization). Generators go on while the trainer trains: slots bound by how many versions what they
make is older than the weights that it trains, and a replay buffer holds it. On the way one generator is killed; its
requests are made again, and its successor takes the weights from the trainer. Later the trainer is killed in the middle
of a step; its successor reads what was saved, and makes the step again with the same batch.

With --broken the rewards of a group are shuffled before they are used: everything runs, nothing is learned. With
--asyncio the loop is a program of asyncio, and the generators are actors of asyncio. What --checkpoint has saved is
gone on from by --resume, also after the whole program was killed (--die-after): no group is lost or trained twice. With
--staleness 0 what is learned depends on the seed alone, so it is the same with and without an interruption.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import os
import pickle
import signal
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import attrs
import torch
import trio
from torch import Tensor, nn

import trimesh
import trimesh.aio
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

WORKERS = 6
"""Groups that are on their way at once."""

CLIP = 0.2
"""How far the probability of a digit may move from that with which it was drawn, in one step."""

BOUND = 0.9
"""Mean reward that says that copying is learned; guessing gives 1 / DIGITS."""


@attrs.frozen
class Options:
    """What the command line says."""

    steps: int
    seed: int
    staleness: int
    is_broken: bool
    is_asyncio: bool
    folder: Path
    is_resumed: bool
    die_after: int | None


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
        number: Its own; prompt and answers follow from it, and from the weights.
        prompt: Digits.
        answers: Digits of each answer.
        chances: Logarithm of the probability with which each of those was drawn.
        generator: Which replica has made them, and which of its processes (0 for the first).
        rewards: Of each answer.
        version: Of the weights when the work began.
    """

    number: int
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


def save(path: Path, state: Any) -> None:
    """Write a file that is there whole or not at all."""
    path.with_suffix(".new").write_bytes(pickle.dumps(state))
    path.with_suffix(".new").replace(path)


class Trainer(Actor):
    """Has the weights, and publishes them. What it has learned is in a file before its step is over."""

    def __init__(self, options: Options, version: int) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(options.seed)
        self.options = options
        self.is_successor = trimesh.context().incarnation > 0
        self.policy = Policy()
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=3e-3)
        self.published = Published()
        self.publishing = trio.Lock()
        self.published_version = -1
        self.report = Report(0, 0.0, 0)
        saved = {int(path.stem): path for path in options.folder.glob("[0-9]*.pt")}
        if self.is_successor:
            version = max(saved, default=0)  # what its predecessor has saved last
        for later in [number for number in saved if number > version]:
            saved[later].unlink()  # of a program that was killed before the loop was saved
        if version:
            policy, optimizer, self.report = pickle.loads((options.folder / f"{version}.pt").read_bytes())
            self.policy.load_state_dict(policy)
            self.optimizer.load_state_dict(optimizer)

    @endpoint(group="weights", concurrency=4, idempotent=True)
    async def publication(self) -> tuple[int, Published]:
        """Return the version of the weights, and the handle by which generators read them."""
        async with self.publishing:
            if self.published_version < self.report.version:
                self.published_version = self.report.version
                await self.published.publish(self.policy.state_dict())
        return self.published_version, self.published

    @endpoint(idempotent=True)
    async def step(self, version: int, groups: list[Group], *, is_killed: bool) -> Report:
        """Train a version with one batch; a step that a predecessor has made is not made again."""
        if self.report.version == version:
            rewards = torch.tensor([group.rewards for group in groups])
            if self.options.is_broken:
                rewards = rewards[:, torch.randperm(ANSWERS, generator=torch.Generator().manual_seed(version))]
            self.learn(groups, rewards)
            if is_killed and not self.is_successor:
                os.kill(os.getpid(), signal.SIGKILL)
            age = version - min(group.version for group in groups)
            self.report = Report(version + 1, torch.tensor([group.rewards for group in groups]).mean().item(), age)
            state = self.policy.state_dict(), self.optimizer.state_dict(), self.report
            save(self.options.folder / f"{version + 1}.pt", state)
            (self.options.folder / f"{version - 1}.pt").unlink(missing_ok=True)  # the loop goes on from the last two
        return self.report

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

    @endpoint
    def digest(self) -> str:
        """Return some letters that differ for other weights."""
        weights = b"".join(tensor.numpy().tobytes() for tensor in self.policy.state_dict().values())
        return hashlib.sha256(weights).hexdigest()[:16]


class Engine:
    """Answers prompts. The handle on the trainer is all that it needs to begin, also after a restart."""

    def __init__(self, options: Options, trainer: Trainer) -> None:
        torch.set_num_threads(1)
        here = trimesh.context()
        self.name = (here.point["replica"], here.incarnation)
        self.seed = options.seed
        self.policy = Policy()
        self.trainer = trainer
        self.version = -1

    @endpoint(idempotent=True)
    async def pull(self, version: int) -> None:
        """Take the newest weights, of this version or of a later one."""
        if self.version < version:
            self.version, weights = await self.trainer.publication.options(retry=SURVIVE).call_one()
            async with weights.pin() as snapshot:
                await snapshot.read_into(self.policy.state_dict())

    @endpoint(idempotent=True)
    async def generate(self, number: int) -> Group:
        """Make the prompt of a number, and answer it many times."""
        if self.version < 0:
            await self.pull(0)
        dice = torch.Generator().manual_seed(self.seed * 1_000_003 + number)
        prompt = torch.randint(DIGITS, (LENGTH,), generator=dice).tolist()
        text = torch.tensor([[*prompt, DIGITS]] * ANSWERS)
        chances: list[Tensor] = []
        with torch.no_grad():
            for _ in range(LENGTH):
                after = self.policy(text)[:, -1]
                drawn = torch.multinomial(after.exp(), 1, generator=dice)
                chances.append(after.gather(1, drawn))
                text = torch.cat([text, drawn], 1)
        return Group(number, prompt, text[:, LENGTH + 1 :].tolist(), torch.cat(chances, 1).tolist(), self.name)


class Generator(Engine, Actor):
    """An engine in Trio."""


class AsyncioGenerator(Engine, trimesh.aio.Actor):
    """The same as a program of asyncio, as inference engines are."""


class Judge(Actor):
    """Scores answers."""

    @endpoint(concurrency=4, idempotent=True)
    async def score(self, prompt: list[int], answers: list[list[int]]) -> list[float]:
        """Return the share of right digits of each answer."""
        return [sum(map(int.__eq__, prompt, answer)) / LENGTH for answer in answers]


@attrs.define
class Loop:
    """Everything that works together, and what it has come to.

    Attributes:
        next_number: Of the next group that was never begun.
        open: Numbers of groups that were begun and are not trained.
        again: Those of them that no process works on any more.
        made: Groups by generator.
    """

    options: Options
    trainer: Any
    generators: Any
    generation: Any
    pool: Pool[Any]
    judges: Pool[Judge]
    slots: Slots
    buffer: ReplayBuffer[Group]
    reports: list[Report] = attrs.field(factory=list[Report])
    next_number: int = 0
    open: set[int] = attrs.field(factory=set[int])
    again: list[int] = attrs.field(factory=list[int])
    made: Counter[tuple[int, int]] = attrs.field(factory=Counter[tuple[int, int]])

    async def roll(self) -> None:
        """Make groups for ever, as the slots allow."""
        while True:
            async with self.slots.lease() as lease:
                number = self.begin()
                group = await self.pool.generate(number)
                rewards = await self.judges.score(group.prompt, group.answers)
                await self.buffer.add(
                    attrs.evolve(group, rewards=rewards, version=lease.version), version=lease.version
                )
                self.made[group.generator] += 1

    def begin(self) -> int:
        """Return the number of a group to be made."""
        if self.again:
            return self.again.pop(0)
        self.open.add(self.next_number)
        self.next_number += 1
        return self.next_number - 1

    async def train(self) -> None:
        """Make the steps that are left."""
        steps = self.options.steps
        for step in range(self.slots.statistics().version + 1, steps + 1):
            is_killed = step == 2 * steps // 3
            async with self.buffer.taking(
                PROMPTS
            ) as groups:  # if this program dies here, they are there when it resumes
                groups.sort(key=lambda group: group.number)
                train = self.trainer.step.options(retry=SURVIVE)
                self.reports.append(await train.call_one(step - 1, groups, is_killed=is_killed))
            self.open -= {group.number for group in groups}
            if is_killed:
                print(f"step {step:4}  the trainer was killed")
            async with self.pool.paused("keep"):  # what runs goes on, nothing begins
                await self.generators.pull.options(retry=SURVIVE).call(step)  # waits for who is down
            await self.slots.advance(version=step)
            if step % 10 == 0:
                print(f"step {step:4}  reward {mean_reward(self.reports):.2f}  oldest {self.reports[-1].age} versions")
            if step == steps // 3:
                await self.generation.kill([{"replica": 1}])
                print(f"step {step:4}  generator 1 was killed")
            self.save()
            if step == self.options.die_after:
                print(f"step {step:4}  this program is killed", flush=True)
                os.kill(os.getpid(), signal.SIGKILL)

    def save(self) -> None:
        """Save what is not the trainer's; the trainer has saved this version, and the one before."""
        state = self.slots.state_dict(), self.buffer.state_dict(), self.next_number, self.open, self.reports, self.made
        save(self.options.folder / "loop", state)

    def load(self) -> None:
        """Go on from what `save` has saved: groups that were under way are made again."""
        state = pickle.loads((self.options.folder / "loop").read_bytes())
        slots, buffer, self.next_number, self.open, self.reports, self.made = state
        self.slots.load_state_dict(slots)
        self.buffer.load_state_dict(buffer)
        self.again = sorted(self.open - {value.number for _, value, *_ in buffer["items"]})
        print(f"resumed after step {self.slots.statistics().version}")

    def account(self) -> None:
        """Show that every piece of work is accounted for."""
        requests, items, places = self.pool.statistics(), self.buffer.statistics(), self.slots.statistics()
        ends = requests.succeeded + requests.failed + requests.cancelled
        gone = sum(items.evicted.values())
        print(f"generators made {dict(sorted(self.made.items()))} groups, by replica and process")
        print(f"requests: {requests.made} made, {ends} ended, {requests.retried} of them made again after a death")
        print(f"groups: {items.added} added, {items.taken} trained, {items.stored} stored, {gone} evicted")
        print(
            f"slots: {places.begun} begun, {places.handed_on} handed on, {places.returned} returned, "
            f"{places.lost} lost by a kill of the program"
        )
        assert requests.made == ends
        assert items.added == items.taken + items.stored + gone
        assert items.taken == self.options.steps * PROMPTS
        assert places.begun == places.handed_on + places.returned + places.lost
        assert max(report.age for report in self.reports) <= self.options.staleness


SURVIVE = Retry(10, on=(ProcDied,))
HEALED: dict[str, Any] = {"supervision": Restart("one_for_one", backoff=Backoff(0.01))}


async def main(options: Options) -> None:
    """Train, kill a generator and the trainer on the way, and show what was learned."""
    version = pickle.loads((options.folder / "loop").read_bytes())[0]["version"] if options.is_resumed else 0
    async with (
        this_host().warm(preload=("torch", "torch._dynamo")) as host,  # what optimizers import
        host.spawn_procs({}, name="training", **HEALED) as training,
        host.spawn_procs({"replica": 2}, name="generation", **HEALED) as generation,
        host.spawn_procs({"replica": 2}, name="judgement") as judgement,
    ):
        trainer = await training.spawn("trainer", Trainer, options, version)
        engine: Any = AsyncioGenerator if options.is_asyncio else Generator
        generators = await generation.spawn("generators", engine, options, trainer)
        async with (
            open_pool(generators, concurrency=1) as pool,
            open_pool(await judgement.spawn("judges", Judge), concurrency=4) as judges,
            open_slots(batch=PROMPTS, staleness=options.staleness) as slots,
            open_replay(capacity=100, slots=slots) as buffer,
        ):
            loop = Loop(options, trainer, generators, generation, pool, judges, slots, buffer)
            if options.is_resumed:
                loop.load()
            await (work_in_asyncio if options.is_asyncio else work)(loop)
            loop.account()
            print(f"weights {await trainer.digest.call_one()}")
    reward = mean_reward(loop.reports)
    print(f"reward {reward:.2f}: copying is {'learned' if reward >= BOUND else 'not learned'}, the bound is {BOUND}")


async def work(loop: Loop) -> None:
    """Generate while the trainer trains."""
    async with trio.open_nursery() as nursery:
        for _ in range(WORKERS):
            nursery.start_soon(loop.roll)
        await loop.train()
        nursery.cancel_scope.cancel()


async def work_in_asyncio(loop: Loop) -> None:
    """The same in asyncio: whatever is awaited of handles works there as it is."""
    async with asyncio.TaskGroup() as group:
        workers = [group.create_task(loop.roll()) for _ in range(WORKERS)]
        await loop.train()
        for worker in workers:
            worker.cancel()


def mean_reward(reports: list[Report]) -> float:
    """Return the mean reward of the newest ten steps."""
    newest = [report.reward for report in reports[-10:]]
    return sum(newest) / len(newest)


def read_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=80, help="of training (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and prompts (default: %(default)s)")
    parser.add_argument("--staleness", type=int, default=1, help="versions between a group's begin and its training")
    parser.add_argument("--broken", action="store_true", help="shuffle the rewards of each group")
    parser.add_argument("--asyncio", action="store_true", help="the loop and the generators as programs of asyncio")
    parser.add_argument("--checkpoint", type=Path, help="folder that is saved to after each step")
    parser.add_argument("--resume", action="store_true", help="go on from what is saved there")
    parser.add_argument("--die-after", type=int, metavar="STEP", help="kill the program itself, to be resumed")
    return parser.parse_args()


if __name__ == "__main__":
    given = read_options()
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.checkpoint or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        chosen = Options(
            given.steps, given.seed, given.staleness, given.broken, given.asyncio, folder, given.resume, given.die_after
        )
        if given.asyncio:
            asyncio.run(main(chosen))
        else:
            trio.run(main, chosen)
