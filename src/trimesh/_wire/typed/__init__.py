"""User values as bytes without pickle, by their annotations. Pure."""
