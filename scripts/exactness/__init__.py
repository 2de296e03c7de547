"""Parts of ``scripts/gpu_exactness.py``."""
