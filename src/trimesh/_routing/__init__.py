"""Pure state machines of message routing: credits, completion of calls, channel accounts, deadlock search."""
