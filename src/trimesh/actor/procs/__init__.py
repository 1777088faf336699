"""What is behind the handle on a mesh of processes."""
