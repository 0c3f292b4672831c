"""Files of TLS as Kubernetes mounts them, and a clock for what looks whether they have changed."""

import os
from pathlib import Path

from benchmarks.certificates import Pair, make_pair
from tgis.security.tls import TlsFiles
from tgis.utils.file_watch import CHECK_INTERVAL_SECONDS


class Secret:
    """A mounted Kubernetes secret: the files are links through `..data`, which is swapped in one rename."""

    def __init__(self, directory: Path, authority: Pair) -> None:
        self._directory = directory
        self._versions = 0
        self.authority = authority
        self.pair = make_pair(authority)
        self.publish(self.pair.cert, self.pair.key)
        for name in ("tls.crt", "tls.key", "ca.crt"):
            (directory / name).symlink_to(Path("..data") / name)

    def publish(self, cert: bytes, key: bytes) -> None:
        self._versions += 1
        version = self._directory / f"..{self._versions}"
        version.mkdir()
        (version / "tls.crt").write_bytes(cert)
        (version / "tls.key").write_bytes(key)
        (version / "ca.crt").write_bytes(self.authority.cert)
        link = self._directory / "..tmp"
        link.symlink_to(version.name)
        os.replace(link, self._directory / "..data")

    def renew(self) -> Pair:
        self.pair = make_pair(self.authority)
        self.publish(self.pair.cert, self.pair.key)
        return self.pair

    def files(self, *, mutual: bool = False) -> TlsFiles:
        path = str(self._directory)
        return TlsFiles(f"{path}/tls.crt", f"{path}/tls.key", f"{path}/ca.crt" if mutual else None)


class Clock:
    """A fake clock."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def next_check(self) -> None:
        self.now += CHECK_INTERVAL_SECONDS
