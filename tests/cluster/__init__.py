"""Tests against a real Kubernetes API server, and what sets it up: see ``prepare`` and ``control_plane``."""
