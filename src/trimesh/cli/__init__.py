"""The command `trimesh`: inspects and controls runs of this user. Needs the extra `cli`."""
