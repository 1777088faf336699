"""Memory of this process and its devices, and handles on memory of other processes."""
