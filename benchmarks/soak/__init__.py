"""The soak test, `python -m benchmarks.soak`: a server under everything that clients do.

`cases` collects expected answers from the idle server, `calls` makes the load and compares with them,
`killed_client` is a client that gets killed, `client_log` counts what clients saw, `reconcile` compares the server's
metrics with that log, `memory` watches whether its processes grow.
"""
