"""The container images: ``python -m images.build`` makes them, ``python -m images.base`` a base without a registry."""
