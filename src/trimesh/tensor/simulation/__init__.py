"""Simulation: a mesh without processes, which runs programs on shapes and estimates time, memory and traffic."""
