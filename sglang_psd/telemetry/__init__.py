"""What every round leaves behind: running figures and the step trace. Counting never touches the device."""
