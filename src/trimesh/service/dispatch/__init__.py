"""PURE: which request of a pool goes to which replica, and when."""
