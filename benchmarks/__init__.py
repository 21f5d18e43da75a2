"""Benchmarks against stock vLLM; not part of the installed package."""
