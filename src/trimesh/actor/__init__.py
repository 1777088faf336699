"""What users write: actors, endpoints, meshes."""
