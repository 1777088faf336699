"""`python -m trimesh.cli`: the command `trimesh`, for when its script is not on the path."""

from trimesh.cli.main import main

main()
