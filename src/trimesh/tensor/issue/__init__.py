"""From an operator of torch to a command, and from values on the ranks to values here."""
