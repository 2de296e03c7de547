"""Helpers of ``train_tiny_pair.py``: text sources, chat samples, training and measuring."""
