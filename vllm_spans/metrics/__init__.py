"""Engine counters: collected in the scheduler, carried by vLLM's scheduler stats, exported by the API server."""
