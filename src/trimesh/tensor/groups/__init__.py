"""Process groups of a team: rendezvous of its ranks, departed ranks, stores for torch."""
