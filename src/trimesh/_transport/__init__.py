"""Links between processes, over the native library or in memory."""
