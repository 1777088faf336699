"""An agent in a step of Slurm, and how it has ended in the words of Slurm."""

from __future__ import annotations

from collections.abc import Sequence

import trio

from trimesh.errors import SpawnError
from trimesh.jobs.child_agent import FarAgent
from trimesh.jobs.launcher import AgentExit
from trimesh.jobs.slurm.asking import ask, own_environment
from trimesh.jobs.words.slurm import JobState, job_state, node_words


class SlurmAgent(FarAgent):
    """A step of Slurm that carries an agent; see `StartedAgent`."""

    def __init__(self, process: trio.Process, node: str, job: str, srun: Sequence[str]) -> None:
        super().__init__(process, (*srun, "sh", "-c"), own_environment())
        self._node = node
        self._job = job

    async def exit_of(self, code: int) -> AgentExit:
        """See `ChildAgent.exit_of`: what Slurm says, where that is why."""
        ended = await super().exit_of(code)
        try:
            said = job_state(await ask("scontrol", "-o", "show", "job", self._job))
        except SpawnError:
            said = JobState("")
        node = await self._node_words(said)
        if said.is_alive:
            if self.number is None:
                return AgentExit(f"srun: {ended.text}{node}", ended.last_words, "refused")
            return AgentExit(f"{ended.text}{node}", ended.last_words, "node failed" if node else ended.reason)
        return AgentExit(f"{said.text}{node}; srun: {ended.text}", ended.last_words, said.reason)

    async def _node_words(self, said: JobState) -> str:
        """Return what Slurm says of the node, where that may be why; else ""."""
        if not said.is_alive and said.reason != "node failed":
            return ""
        try:
            words = node_words(await ask("scontrol", "-o", "show", "node", self._node))
        except SpawnError:
            return ""
        return f"; Slurm says that {self._node} is {words}" if words.startswith(("DOWN", "FAIL", "NOT")) else ""
