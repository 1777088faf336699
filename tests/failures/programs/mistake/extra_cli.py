"""The command `trimesh` without the extra `cli`.

Words: pip install 'trimesh-actors[cli]'
"""

import sys


class NoCyclopts:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "cyclopts":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, NoCyclopts())
sys.argv = ["trimesh", "ps"]

from trimesh.cli.main import main

main()
