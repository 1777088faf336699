"""One file a workload. Each measures the same twice: `trimesh_side` and `monarch_side`, in processes of their own.

A side is a coroutine function (Trio's, or asyncio's) from a `Scale` to samples: metric name and values. `METRICS` says
how each metric is summed up.
"""
