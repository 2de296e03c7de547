"""What the fault and soak scripts share: load on a server, and attacks on its drafter."""
