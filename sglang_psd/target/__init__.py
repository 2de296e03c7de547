"""The target's side of a round: verify forward, acceptance, commit."""
