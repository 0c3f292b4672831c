"""The chaos soak, `python -m benchmarks.chaos`: faults and hostile clients that honest clients must not notice.

`faults` are those of processes, files and limits; `attacks` and `http_attacks` are what hostile clients do, in
processes of their own (`attacker`). `shim` is preloaded into the server, which `supervisor` restarts when it has
exited. `clients` and `http_clients` are the honest ones; `fault_log` says what they may notice, `usage` what an idle
server must have released, and `rounds` puts everything together.
"""
