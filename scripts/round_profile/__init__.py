"""Where the host's time goes in a round: stamps taken in the server's processes, and what they say together."""
