"""Worker side: un-rotated K in the cache, rotated on the way to vLLM's own attention kernels."""
