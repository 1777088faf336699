"""Exceptions as bytes and back: records, texts, the original type. Pure."""
