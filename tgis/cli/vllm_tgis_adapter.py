"""`python -m vllm_tgis_adapter`: `tgis serve` with the variables and defaults of vllm-tgis-adapter."""

from tgis.cli import serve
from tgis.config import from_command_line


def main(argv: list[str], prog: str) -> int:
    """Serve until a signal."""
    return serve.run(lambda: from_command_line(argv, prog, as_adapter=True))
