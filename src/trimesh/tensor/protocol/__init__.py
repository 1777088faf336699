"""Messages between controller and ranks, the records in them, and facts about operators that both sides use."""
