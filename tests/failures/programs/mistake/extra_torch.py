"""`trimesh.tensor` without torch.

Words: pip install 'trimesh-actors[torch]'
"""

import sys


class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, NoTorch())

import trimesh.tensor

print(trimesh.tensor.ones)
