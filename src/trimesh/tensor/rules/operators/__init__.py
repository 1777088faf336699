"""Rows of the table, one module for each family of operators."""
