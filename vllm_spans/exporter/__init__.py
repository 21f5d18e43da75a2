"""The fleet's view: find engine pods, read their metrics, export what they say together.

Nothing here imports vLLM or torch; the Kubernetes client is imported only where a cluster is watched.
"""
