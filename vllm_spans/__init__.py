"""KV reuse of marked token ranges ("spans") at any position, on vLLM."""

__version__ = "0.1.0"
