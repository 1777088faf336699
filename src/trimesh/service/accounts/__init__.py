"""PURE: who may begin work now, and what became of each item that was stored."""
