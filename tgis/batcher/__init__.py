"""The batcher: which requests run in the next step. A pure library: no torch, no grpc, no asyncio, no clock."""
