"""`spawn_procs` is entered in a plain function.

Words: trimesh.blocking
"""

from trimesh import this_host


def main() -> None:
    with this_host().spawn_procs({"gpus": 2}) as procs:
        print(procs)


main()
