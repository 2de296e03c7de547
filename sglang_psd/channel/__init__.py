"""The wire between scheduler and drafter: typed messages, no tensors, neither torch nor SGLang."""
