"""A mesh without processes: the same program runs on shapes alone, and what it would take is counted."""
