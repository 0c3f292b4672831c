"""The gRPC API: `fmaas.GenerationService`, health and reflection."""
