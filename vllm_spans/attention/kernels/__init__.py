"""GPU kernels for attention over un-rotated K: torch and Triton only, so that they can be tested without vLLM."""
