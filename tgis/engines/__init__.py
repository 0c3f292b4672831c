"""The engines: one class per engine behind `base.Engine`, picked by name and imported only when it is."""

from importlib import import_module

from tgis.engines.base import Engine
from tgis.messages import EngineOptions

_ENGINES = {
    "fake": ("tgis.engines.fake", "FakeEngine"),
    "hf_transformers": ("tgis.engines.hf_transformers", "TransformersEngine"),
    "tgis_native": ("tgis.engines.tgis_native", "PagedEngine"),
}


def load_engine(options: EngineOptions) -> Engine:
    """The engine that the options name, its model loaded."""
    module, name = _ENGINES[options.engine]
    engine: Engine = getattr(import_module(module), name)(options)
    return engine
