"""`python -m trimesh`: the command `trimesh`, where its script is not on the path."""

from trimesh.cli.main import main

main()
