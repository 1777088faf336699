"""Histories of operations, and whether one order explains them."""
