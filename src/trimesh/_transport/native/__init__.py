"""The transport and the mover over the native library."""
