"""Tests on a real Kubernetes: the API server alone (``control_plane``), and a whole node (``node``)."""
