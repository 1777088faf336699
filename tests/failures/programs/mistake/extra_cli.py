"""The command `trimesh` without the extra `cli`.

Words: pip install
"""

import runpy
import sys


class NoCyclopts:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("cyclopts", "rich", "textual"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, NoCyclopts())
sys.argv = ["trimesh", "ps"]

runpy.run_module("trimesh", run_name="__main__")
