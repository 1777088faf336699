"""User-facing API: actors, endpoints, meshes."""
