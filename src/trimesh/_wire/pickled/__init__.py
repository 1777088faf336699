"""User values as bytes by pickle, with arrays out of band and definitions by value. Pure."""
