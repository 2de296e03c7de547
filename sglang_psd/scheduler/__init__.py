"""The scheduler's side: two slots, the overlapped loop, and what every round leaves in the records."""
