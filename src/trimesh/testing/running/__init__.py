"""Tests and their seeds: how one item runs, and what is said of a failure."""
