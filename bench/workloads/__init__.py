"""One file a workload, which measures the same in each library, in processes of their own.

A side is a coroutine function (Trio's, or asyncio's) from a `Scale` to samples: metric name and values. What can be
written once is `any_side`, which gets the library (`bench.meshes`), too; where a library needs code of its own there is
a `trimesh_side`, a `monarch_side` and so on, which goes before. `METRICS` says how each metric is summed up, `LACKS`
why a library has no side.
"""
