"""`make trainings-fuzz`: random trainings under plans, pipelines and checkpoints, compared with plain torch.

python -m tests.tensor.trainings --trainings 1000 --first-seed 0    # until one of the two is reached
python -m tests.tensor.trainings --seconds 120
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
import warnings
from collections import Counter

import trio
from tests.tensor.trainings.runs import in_words, judge, meshes
from tests.tensor.trainings.training import generate


async def search(options: argparse.Namespace) -> int:
    """Run trainings; return how many were wrong."""
    began = time.monotonic()
    counts: Counter[str] = Counter()
    wrong = 0
    async with meshes() as found:
        for seed in range(options.first_seed, options.first_seed + options.trainings):
            if time.monotonic() - began > options.seconds:
                break
            training = generate(seed)
            if options.kind and not any(options.kind in one.kinds.values() for one in training.phases):
                continue
            verdict = await judge(training, found)
            counts["trainings"] += 1
            counts["compared"] += verdict.compared
            counts["decided by rounding"] += verdict.loose
            for phase in training.phases:
                counts.update(phase.kinds.values())
                counts["pipelines"] += bool(phase.stages)
            counts["checkpoints"] += len(training.phases) - 1
            if verdict.findings:
                wrong += 1
                print(in_words([verdict]) + "\n", flush=True)
    took = time.monotonic() - began
    print(f"{wrong} wrong from seed {options.first_seed} on in {took:.0f} s: {dict(counts)}")
    return wrong


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.tensor.trainings", description=__doc__.splitlines()[0])
    parser.add_argument("--trainings", type=int, default=1000)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--kind", default="", help="only trainings with a plan of this kind: sharded, tensor, ...")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)  # each failure that nobody has asked for is one
    sys.exit(1 if trio.run(search, options) else 0)


if __name__ == "__main__":
    main()
