"""tgis: a gRPC-first text-generation inference service, a drop-in for IBM's TGIS."""

__version__ = "1.0.0"
