"""Print docs/settings.md: `python -m trimesh.config`."""

import sys

from trimesh.config.page import page

sys.stdout.write(page())
