"""`grpc_healthcheck`: the probe of vllm-tgis-adapter with its flags; `tgis health` does the work."""

from tgis.cli import health
from tgis.utils.options import TEXT, Parser, decimal


def main(argv: list[str], prog: str) -> int:
    """Return 0 if the service is SERVING, else 1."""
    parser = Parser(prog=prog, description="Check a server with grpc.health.v1: exit code 0 if it is ready, else 1.")
    parser.add_argument(
        "--server-url", default="localhost:8033", metavar="HOST:PORT", help="gRPC address (default: localhost:8033)"
    )
    parser.add_argument(
        "--timeout", type=decimal(0, 3600), default=1.0, metavar="X", help="seconds to wait (default: 1)"
    )
    parser.add_argument(
        "--service-name",
        type=TEXT,
        default=health.SERVICE,
        metavar="NAME",
        help=f"service to check (default: {health.SERVICE})",
    )
    security = parser.add_mutually_exclusive_group()
    security.add_argument("--insecure", action="store_true", help="use no TLS (the default)")
    security.add_argument(
        "--secure",
        action="store_true",
        help="use TLS and trust the CA certificates in GRPC_DEFAULT_SSL_ROOTS_FILE_PATH",
    )
    options = parser.parse_args(argv)
    service, timeout = f"--service={options.service_name}", f"--timeout={options.timeout}"
    return health.main([f"--target={options.server_url}", service, timeout, *["--tls"] * options.secure], prog)
