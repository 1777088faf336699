"""The same mesh in each library, so that a workload is written once.

Each module here offers:

- `run(function, *arguments)`: run a coroutine function in the library's event loop, and end its runtime;
- `open_host()`: an async context manager around what later meshes find ready (a warm spawner, a cluster, nothing);
- `open_mesh(ranks, host=None)`: processes with one `Member` each, as a `Mesh`; without a host, all from nothing;
- `while_running(work, look)`: call `look` again and again until `work`, which runs beside it, has ended.

A `Mesh` has the methods that `bench/meshes/mesh.py` lists. A library that cannot do one leaves it out, and the workload
that needs it says so in `LACKS`. Each method is written as a user of that library would write it.
"""
