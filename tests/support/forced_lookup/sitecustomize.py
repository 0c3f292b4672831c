"""With this directory in PYTHONPATH, engine processes propose all that they may: PROPOSER=lookup, garbage or drafts.

Decoder-only models draft for themselves where no SPECULATOR_NAME is set.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

if "tgis.engine_core.main" in sys.orig_argv:
    sys.path.append(os.path.dirname(os.path.dirname(__file__)))
    import msgspec
    import proposers

    from tgis import engines
    from tgis.batcher import batcher
    from tgis.ipc.messages import EngineOptions

    PROPOSER, load_engine = os.environ["PROPOSER"], engines.load_engine

    def load_with_draft(options: EngineOptions, *callbacks: Any) -> Any:
        config = json.loads((Path(options.model_path) / "config.json").read_text())
        if not (options.speculator_path or config.get("is_encoder_decoder")):
            options = msgspec.structs.replace(options, speculator_path=options.model_path)
        return load_engine(options, *callbacks)

    kinds = {"lookup": proposers.ForcedLookup, "garbage": proposers.Adversary, "drafts": proposers.ForcedDrafts}
    vars(batcher)["Speculator"] = kinds[PROPOSER]
    if PROPOSER == "drafts":
        vars(engines)["load_engine"] = load_with_draft
