"""The command `trimesh`: what runs of this user do, and how they are stopped. It needs the extra `cli`."""
