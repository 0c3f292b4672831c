"""`python -m benchmarks.chaos`: a server under attack keeps its promises to honest clients.

`attacks` has the hostile clients, `honest` the honest ones, `probes` checks the limits of single clients, and
`promises` compares the figures with the bounds.
"""
