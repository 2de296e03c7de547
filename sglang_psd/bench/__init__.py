"""``sglang-psd bench``: ways to serve the same requests, measured by SGLang's own ``bench_serving``."""
