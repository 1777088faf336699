"""User values as bytes by pickle, with arrays beside it and definitions by value. Pure."""
