"""What commands of others print, and what it means."""
