"""The tensor engine of one process and of one mesh: opened, active, closed."""
