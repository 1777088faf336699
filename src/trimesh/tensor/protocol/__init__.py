"""Messages between the controller and the ranks, and the records in them. Pure."""
