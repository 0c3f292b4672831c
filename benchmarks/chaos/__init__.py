"""The chaos soak: faults at random moments beside honest clients, who must not notice. `python -m benchmarks.chaos`.

`faults` has the faults of processes, files and limits, and `attacks` what hostile clients do, in processes of their own
(`attacker`). `shim` is preloaded into the server, which `supervisor` starts again when it has exited. `clients` are
honest; `fault_log` says what they may notice, `usage` what an idle server must have given back, `rounds` puts all
together.
"""
