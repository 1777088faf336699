"""Other processes: the link to one, who lives at each rank of a mesh, how they ended, what they may send."""
