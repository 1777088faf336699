"""What a run tells who looks on: tables of its processes and calls."""
