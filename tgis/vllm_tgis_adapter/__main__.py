"""`python -m vllm_tgis_adapter`."""

import sys

from tgis.__main__ import run_command

if __name__ == "__main__":
    sys.exit(run_command("serve.main_as_adapter", sys.argv[1:], "python -m vllm_tgis_adapter"))
