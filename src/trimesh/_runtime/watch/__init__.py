"""What a process tells of itself: reports, stacks, stalls, statistics, events."""
