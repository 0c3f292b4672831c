"""The soak: a server under everything that clients do to it, and then the reconcile. `python -m benchmarks.soak`.

`cases` asks what is right while the server is idle, `calls` makes the load and compares, `victim` is a client to be
killed, `log` what the clients saw, `reconcile` the server's counters against it, `memory` how its processes grow.
"""
