"""``make demo``: the three ways to serve the same requests, side by side."""
