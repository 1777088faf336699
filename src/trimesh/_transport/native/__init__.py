"""Transport and mover over the native library."""
