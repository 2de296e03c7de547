"""What lets stock SGLang serve on a machine without a GPU (demo and tests only)."""
