"""The drafter: a process of its own that turns committed tokens into proposals."""
