"""Load tests: what users of a server will feel, measured honestly (docs/loadtests.md).

The parts that decide what a number means (``sse``, ``stream``, ``arrivals``, ``workloads``, ``reuse``) are pure: they
know neither the network nor a clock, and import neither locust nor gevent.
"""
