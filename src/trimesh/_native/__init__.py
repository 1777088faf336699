"""The native library: found, checked and typed. The only importer of cffi."""
