"""User values as bytes without pickle, by what annotations say. Pure."""
