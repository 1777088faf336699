"""Large messages: outgoing, incoming, and multicast to a host."""
