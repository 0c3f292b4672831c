"""The child process of `tgis.models.convert.fast_tokenizer`: transformers writes tokenizer.json.

`python -m tgis.models.convert.fast_tokenizer_child MODEL OUT`, both directories.
"""

import os
import sys


def main() -> None:
    """Convert with local files only, without running the model's code; the parent reports exceptions."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # read by the following import
    from transformers import AutoTokenizer  # noqa: PLC0415 - see above

    model, out = sys.argv[1:]
    tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True, trust_remote_code=False)
    tokenizer.save_pretrained(out)


if __name__ == "__main__":
    main()
