"""A cell of a notebook calls an endpoint that raises.

Words: ZeroDivisionError: division by zero
"""

import contextlib
import sys

from IPython.core.interactiveshell import InteractiveShell

CELLS = (
    """
from trimesh import Actor, endpoint
from trimesh.blocking import this_host

class Trainer(Actor):
    @endpoint
    def step(self, batch: int) -> float:
        return 1 / batch
""",
    """
procs = this_host().spawn_procs({"gpus": 2}).open()
trainers = procs.spawn("trainers", Trainer)
""",
    "trainers.slice(gpus=1).step.call_one(0)",
    "procs.close()",
)

with contextlib.redirect_stdout(sys.stderr):
    shell = InteractiveShell.instance(colors="nocolor")
    for cell in CELLS:
        shell.run_cell(cell)
