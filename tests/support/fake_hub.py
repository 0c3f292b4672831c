"""A fake of the Hugging Face Hub's HTTP API, as far as huggingface_hub asks it about the files of models."""

import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_of_somebody_with_access"


@dataclass
class Repo:
    """A repository; each revision names one of `commits`."""

    commits: dict[str, dict[str, bytes]]
    revisions: dict[str, str]
    private: bool = False  # found only with TOKEN
    gated: bool = False  # listed for everybody, downloaded only with TOKEN


@dataclass
class FakeHub:
    """The contents of the hub, and what was downloaded."""

    endpoint: str = ""
    repos: dict[str, Repo] = field(default_factory=dict)
    downloads: list[str] = field(default_factory=list)  # names of files
    fails: bool = False  # answers downloads with status 500

    def add(self, name: str, files: dict[str, bytes], revision: str = "main", **access: bool) -> str:
        """Make `revision` of repository `name` a commit with these files; returns the commit."""
        commit = _sha1(repr(sorted(files.items())).encode())
        repo = self.repos.setdefault(name, Repo({}, {}, **access))
        repo.commits[commit] = files
        repo.revisions |= {revision: commit, commit: commit}
        return commit


@contextlib.contextmanager
def running() -> Iterator[FakeHub]:
    hub = FakeHub()
    server = _Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Server(ThreadingHTTPServer):
    """Has room for all connections of a client that come at once: Linux may reset those beyond."""

    daemon_threads = True
    request_queue_size = 128


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: FakeHub

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        found = re.fullmatch(r"(?:/api/models)?/([^/]+/[^/]+)(?:/(revision|tree|resolve)/(.+))?", path)
        repo = self.hub.repos.get(found[1]) if found else None
        if token not in ("", TOKEN, "hf_other"):
            return self._fail(401, "", "Invalid credentials in Authorization header")
        if found is None or repo is None or (repo.private and not token):
            return self._fail(404 if token else 401, "RepoNotFound", "Repository not found")
        revision, _, name = (found[3] or "main").partition("/" if found[2] == "resolve" else "\0")
        commit = repo.revisions.get(revision)
        if commit is None:
            return self._fail(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        if found[2] == "resolve":
            return self._resolve(repo, commit, name, token)
        answer: Any = {"id": found[1], "sha": commit, "private": repo.private, "siblings": []}
        if found[2] == "tree":
            files = repo.commits[commit].items()
            answer = [{"type": "file", "path": name, "size": len(data), "oid": _sha1(data)} for name, data in files]
        return self._send(200, {"Content-Type": "application/json"}, json.dumps(answer).encode())

    def _resolve(self, repo: Repo, commit: str, name: str, token: str) -> None:
        if repo.gated and token != TOKEN:
            return self._fail(403 if token else 401, "GatedRepo", "Access to this model is restricted.")
        if self.hub.fails:
            return self._fail(500)
        content = repo.commits[commit].get(name)
        if content is None:
            return self._fail(404, "EntryNotFound", "Entry not found")
        if self.command == "GET":
            self.hub.downloads.append(name)
        return self._send(200, {"X-Repo-Commit": commit, "ETag": f'"{_sha1(content)}"'}, content)

    def _fail(self, status: int, code: str = "", message: str = "") -> None:
        self._send(status, {"X-Error-Code": code, "X-Error-Message": message} if code or message else {}, b"{}")

    def _send(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - as in the standard library
        """Says nothing."""


def _sha1(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()
