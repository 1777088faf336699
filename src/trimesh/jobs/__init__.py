"""Hosts of a mesh that others start: who may be one (`identity`). Not imported by `import trimesh`."""
