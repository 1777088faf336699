"""Messages between the controller and the ranks, the records in them, and what both sides know of an operator."""
