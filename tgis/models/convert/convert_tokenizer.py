"""The child process of `tgis.models.convert.fast_tokenizer`: lets transformers write tokenizer.json.

`python -m tgis.models.convert.convert_tokenizer MODEL OUT`, both directories.
"""

import os
import sys


def main() -> None:
    """Reads local files only and runs none of the model's code; any exception is for the parent to report."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # read by the import that follows
    from transformers import AutoTokenizer  # noqa: PLC0415 - see above

    model, out = sys.argv[1:]
    tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True, trust_remote_code=False)
    tokenizer.save_pretrained(out)


if __name__ == "__main__":
    main()
