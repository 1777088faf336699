"""Process groups of a team: where its ranks meet, who has left, stores for torch."""
