"""The gRPC face: `fmaas.GenerationService`, health and reflection."""
