"""Small parts of tasks: contexts, callers of other loops, interrupts, errors that only follow from a stop."""
