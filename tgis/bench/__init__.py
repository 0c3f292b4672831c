"""The load generator of `tgis bench`, for any server of fmaas.GenerationService.

`measure` is the entry point. `workload` makes the prompts, `load` schedules the requests, `grpc_client` sends them,
`summary` computes the figures and `report` formats them.
"""
