"""Memory of this process and of its devices, and handles on memory of others."""
