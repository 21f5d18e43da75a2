"""Rules and dashboards over the metrics of spans; none of it runs in an engine."""
