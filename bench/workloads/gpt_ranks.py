"""The actor that trains a GPT by plain torch on the ranks."""

from __future__ import annotations

from torch.nn.parallel import DistributedDataParallel

from bench.workloads import gpt
from bench.workloads.plain_ranks import PlainRank
from trimesh import endpoint


class GPTRank(PlainRank):
    """One of several ranks that train a GPT."""

    @endpoint
    def make(self) -> None:
        """Make the model and the batch that the runs train by."""
        self.take(gpt.Training(DistributedDataParallel(gpt.made())).step, gpt.batch())
