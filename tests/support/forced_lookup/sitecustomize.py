"""With this directory in PYTHONPATH, engine processes propose all that they may: PROPOSER=lookup, garbage or drafts."""

import os
import sys

if "tgis.engine_core.main" in sys.orig_argv:
    sys.path.append(os.path.dirname(os.path.dirname(__file__)))
    import proposers

    from tgis.batcher import batcher

    kinds = {"lookup": proposers.ForcedLookup, "garbage": proposers.Adversary, "drafts": proposers.ForcedDrafts}
    vars(batcher)["Speculator"] = kinds[os.environ["PROPOSER"]]
