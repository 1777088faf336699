"""Ray's parameter server: workers compute gradients, one actor holds the weights. First in step, then each at its pace.

Run it: python examples/ray/parameter_server.py [--steps 60]
"""

from __future__ import annotations

import argparse

import numpy as np
import trio

from trimesh import Actor, current_rank, endpoint, this_host, this_proc

TRUE_WEIGHTS = np.array([2.0, -3.0, 0.5])


class ParameterServer(Actor):
    """Holds the weights."""

    def __init__(self, learning_rate: float) -> None:
        self.weights = np.zeros(3)
        self.learning_rate = learning_rate

    @endpoint
    def apply(self, gradients: list[np.ndarray]) -> np.ndarray:
        """Take a step along the mean of some gradients; return the weights."""
        self.weights -= self.learning_rate * np.mean(gradients, axis=0)
        return self.weights

    @endpoint
    def read(self) -> np.ndarray:
        """Return the weights."""
        return self.weights


class DataWorker(Actor):
    """Has a part of the data."""

    def __init__(self) -> None:
        random = np.random.default_rng(current_rank())
        self.inputs = random.normal(size=(64, 3))
        self.targets = self.inputs @ TRUE_WEIGHTS

    @endpoint
    def gradient(self, weights: np.ndarray) -> np.ndarray:
        """Return the gradient of the mean squared error."""
        error = self.inputs @ weights - self.targets
        return 2 * self.inputs.T @ error / len(error)

    @endpoint
    async def train(self, server: ParameterServer, steps: int) -> None:
        """Take steps without waiting for the others."""
        for _ in range(steps):
            weights = await server.read.call_one()
            await server.apply.call_one([DataWorker.gradient(self, weights)])


async def main(steps: int) -> None:
    async with this_host().spawn_procs({"workers": 2}) as procs:
        workers = await procs.spawn("workers", DataWorker)

        async with this_proc().spawn("server", ParameterServer, 0.1) as server:
            weights = await server.read.call_one()
            for _ in range(steps):  # ray.get([worker.compute_gradients.remote(weights) for worker in workers])
                gradients = await workers.gradient.call(weights)
                weights = await server.apply.call_one(list(gradients))
            print(f"in step:      distance {np.linalg.norm(weights - TRUE_WEIGHTS):.4f}")

        async with this_proc().spawn("server", ParameterServer, 0.05) as server:
            await workers.train.call(server, steps)  # ray.wait(...) and one more task for each that has ended
            weights = await server.read.call_one()
            print(f"at own paces: distance {np.linalg.norm(weights - TRUE_WEIGHTS):.4f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="steps of each way (default: %(default)s)")
    trio.run(main, parser.parse_args().steps)
