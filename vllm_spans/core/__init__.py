"""Scheduler side. ``layout``, ``policy``, ``hashing`` and ``plan`` are pure: they import neither torch nor vllm."""
