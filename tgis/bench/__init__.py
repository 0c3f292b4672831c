"""The load generator: `tgis bench` against any server of fmaas.GenerationService, TGI's REST API or OpenAI's.

`measure` is the entry point, `workload` what is sent, `load` when, `client` how (`grpc_client`; `http_client` with
`tgi` and `openai`), `summary` the figures, `report` how they are shown. `simulate` runs the batcher in simulated time.
"""
