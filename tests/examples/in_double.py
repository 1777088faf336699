"""Run an example in float64: python in_double.py EXAMPLE [OPTIONS ...]

Ranks add in another order than one process. In float32 the first steps of Adam, which divides by what is small, magnify
such roundings beyond any bound that says something; how much depends on the processor.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import torch

torch.set_default_dtype(torch.float64)
sys.argv = sys.argv[1:]
sys.path.insert(0, str(Path(sys.argv[0]).parent))
runpy.run_path(sys.argv[0], run_name="__main__")
