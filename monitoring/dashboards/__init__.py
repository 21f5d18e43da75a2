"""Grafana dashboards as code: ``python -m monitoring.dashboards`` writes the JSON in this folder's ``json``."""
