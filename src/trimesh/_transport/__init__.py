"""Links over something real: the native library, or memory."""
