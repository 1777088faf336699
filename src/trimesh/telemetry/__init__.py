"""Traces and metrics of calls, by OpenTelemetry: `instrument()` in each process that is to have them.

Needs the extra `telemetry`, which is the API alone: the program brings its SDK and exporter, and sets them up in the
controller and, by `setup=`, in each process. A process that was not instrumented pays nothing for it.
"""

from trimesh.telemetry.instrumenting import instrument, uninstrument

__all__ = ["instrument", "uninstrument"]
