"""Typed access to the native library. The only importer of cffi."""
