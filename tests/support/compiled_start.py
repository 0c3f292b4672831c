"""Starts tgis_native with PT2_COMPILE on the model given and prints, as JSON, what torch's cache of graphs counted."""

import json
import sys
from pathlib import Path

import torch
from batches import engine_options

from tgis.engines.paged.engine import PagedEngine


def main() -> None:
    changes = {"engine": "tgis_native", "compile": True, "dtype": "float64"}  # for which there are no CPU kernels
    PagedEngine(engine_options(Path(sys.argv[1]), 4, **changes)).warm_up()
    counters = torch._dynamo.utils.counters["inductor"]
    print(json.dumps({name: count for name, count in counters.items() if name.startswith("fxgraph_cache")}))


if __name__ == "__main__":
    main()
