"""The load generator: `tgis bench` against any server of fmaas.GenerationService.

`measure` is the entry point, `workload` what is sent, `load` when, `client` the calls and their times, `summary`
the figures, `report`, `progress` and `plot` how they are shown. `simulate` runs the batcher in simulated time.
"""
