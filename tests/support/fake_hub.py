"""A fake of the Hugging Face Hub's HTTP API: model info, tree, resolve, and the second host that stores large files.

It answers as the hub does, headers included, to what huggingface_hub asks about models, and misbehaves on demand.
"""

import contextlib
import hashlib
import json
import re
import threading
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

LARGE = (".safetensors", ".bin", ".model")  # on the second host, named by sha256
TOKEN = "hf_of_somebody_with_access"


@dataclass
class Repo:
    """A repository; each revision names one of `commits`."""

    commits: dict[str, dict[str, bytes]]
    revisions: dict[str, str]
    private: bool = False  # found only with TOKEN
    gated: bool = False  # listed for everybody, downloaded only with TOKEN


@dataclass
class RecordedRequest:
    method: str
    path: str
    headers: dict[str, str]

    @property
    def first_byte(self) -> int:
        found = re.fullmatch(r"bytes=(\d+)-", self.headers.get("range", ""))
        return int(found[1]) if found else 0


@dataclass
class FakeHub:
    """The contents of both hosts, the requests that they got, and how they misbehave."""

    endpoint: str = ""
    storage: str = ""
    repos: dict[str, Repo] = field(default_factory=dict)
    requests: list[RecordedRequest] = field(default_factory=list)
    overrides: dict[str, bytes] = field(default_factory=dict)  # file or "api" -> what is sent instead
    truncations: dict[str, list[int]] = field(
        default_factory=lambda: defaultdict(list)
    )  # file -> bytes sent before the connection breaks
    statuses: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))  # file or "api" -> first answers

    def add(self, name: str, files: dict[str, bytes], revision: str = "main", **access: bool) -> str:
        """Make `revision` of repository `name` a commit with these files; returns the commit."""
        commit = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
        repo = self.repos.setdefault(name, Repo({}, {}, **access))
        repo.commits[commit] = files
        repo.revisions |= {revision: commit, commit: commit}
        return commit

    def downloads(self) -> list[tuple[str, int]]:
        """The file and first byte of every request that downloaded."""
        gets = [asked for asked in self.requests if asked.method == "GET" and "/api/" not in asked.path]
        return [(asked.path.rpartition("/")[2], asked.first_byte) for asked in gets if not redirected(asked)]


def redirected(asked: RecordedRequest) -> bool:
    return "/resolve/" in asked.path and asked.path.endswith(LARGE)


def git_hash(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@contextlib.contextmanager
def running() -> Iterator[FakeHub]:
    hub = FakeHub()
    with serving(_Api, hub=hub) as hub.endpoint, serving(_Storage, hub=hub) as hub.storage:
        yield hub


class _Server(ThreadingHTTPServer):
    """Has room for all connections of a client that come at once: Linux may reset those beyond."""

    daemon_threads = True
    request_queue_size = 128


@contextlib.contextmanager
def serving(kind: type[BaseHTTPRequestHandler], **attributes: object) -> Iterator[str]:
    """The address of a server whose handlers have these attributes."""
    server = _Server(("127.0.0.1", 0), type(kind.__name__, (kind,), attributes))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: FakeHub

    def do_HEAD(self) -> None:
        self._note_and_answer()

    def do_GET(self) -> None:
        self._note_and_answer()

    def _note_and_answer(self) -> None:
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.hub.requests.append(RecordedRequest(self.command, urlsplit(self.path).path, headers))
        self.answer([unquote(part) for part in urlsplit(self.path).path.strip("/").split("/")])

    def answer(self, parts: list[str]) -> None:
        raise NotImplementedError

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - as in the standard library
        """Tests look at `requests`."""

    def send(self, status: int, headers: dict[str, str], body: bytes = b"", cut: int | None = None) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body[:cut])
        if cut is not None:
            self.wfile.flush()
            self.close_connection = True

    def fail(self, status: int, code: str = "", message: str = "") -> None:
        self.send(status, {"X-Error-Code": code, "X-Error-Message": message} if code or message else {}, b"{}")

    def send_content(self, name: str, content: bytes, headers: dict[str, str]) -> None:
        """Send a file from the requested offset, or its override."""
        if statuses := self.hub.statuses[name]:
            return self.fail(statuses.pop(0))
        content = self.hub.overrides.get(name, content)
        wanted = self.headers.get("Range")
        start = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted else 0
        if start and start >= len(content):
            return self.send(416, {"Content-Range": f"bytes */{len(content)}"})
        if wanted:
            headers = headers | {"Content-Range": f"bytes {start}-{len(content) - 1}/{len(content)}"}
        cuts = self.hub.truncations[name] if self.command == "GET" else []
        return self.send(206 if wanted else 200, headers, content[start:], cuts.pop(0) if cuts else None)


class _Storage(_Handler):
    """The host of large files: URLs are signed, and a token must never reach it."""

    def answer(self, parts: list[str]) -> None:
        if "Authorization" in self.headers or "signature=" not in self.path:
            return self.fail(400, message="Only one auth mechanism allowed")
        _, digest, name = parts
        for repo in self.hub.repos.values():
            for files in repo.commits.values():
                if name in files and hashlib.sha256(files[name]).hexdigest() == digest:
                    return self.send_content(name, files[name], {"ETag": f'"{digest[:32]}"'})
        return self.fail(403)


class _Api(_Handler):
    """The hub itself."""

    def answer(self, parts: list[str]) -> None:
        api = parts[:2] == ["api", "models"]
        if api and (statuses := self.hub.statuses["api"]):
            return self.fail(statuses.pop(0))
        if api and "api" in self.hub.overrides:
            return self.send(200, {}, self.hub.overrides["api"])
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if token not in ("", TOKEN):
            return self.fail(401, message="Invalid credentials in Authorization header")
        path = "/".join(parts[2:] if api else parts)
        found = re.fullmatch(r"(?P<repo>[^/]+/[^/]+)(?:/(?P<verb>revision|tree|resolve)/(?P<rest>.+))?", path)
        repo = self.hub.repos.get(found["repo"]) if found else None
        if found is None or repo is None or (repo.private and not token):
            return self.fail(401 if not token else 404, "RepoNotFound", "Repository not found")
        revision, _, name = (found["rest"] or "main").partition("/" if found["verb"] == "resolve" else "\0")
        commit = repo.revisions.get(revision)
        if commit is None:
            return self.fail(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        match found["verb"]:
            case "resolve":
                return self._resolve(repo, commit, name, token)
            case "tree":
                return self._json(
                    [{"type": "file"} | _entry(*item, "path", "oid", "oid") for item in repo.commits[commit].items()]
                )
        return self._json(
            {
                "id": found["repo"],
                "sha": commit,
                "private": repo.private,
                "siblings": [_entry(*item, "rfilename", "blobId", "sha256") for item in repo.commits[commit].items()],
            }
        )

    def _json(self, value: object) -> None:
        self.send(200, {"Content-Type": "application/json"}, json.dumps(value).encode())

    def _resolve(self, repo: Repo, commit: str, name: str, token: str) -> None:
        if repo.gated and not token:
            return self.fail(401, "GatedRepo", "Access to this model is restricted.")
        content = repo.commits[commit].get(name)
        if content is None:
            return self.fail(404, "EntryNotFound", "Entry not found")
        headers = {"X-Repo-Commit": commit}
        if not name.endswith(LARGE):
            return self.send_content(name, content, headers | {"ETag": f'"{git_hash(content)}"'})
        digest = hashlib.sha256(content).hexdigest()
        headers |= {"X-Linked-Etag": f'"{digest}"', "X-Linked-Size": str(len(content))}
        return self.send(302, headers | {"Location": f"{self.hub.storage}/x/{digest}/{name}?signature=s3cr3t"})


def _entry(name: str, content: bytes, path: str, git_id: str, digest: str) -> dict[str, object]:
    """A file, under the names that an answer has for its path, its id in git and the sha256 of a large one."""
    found = {path: name, "size": len(content), git_id: git_hash(content)}
    if not name.endswith(LARGE):
        return found
    sha256 = hashlib.sha256(content).hexdigest()
    text = f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {len(content)}\n"
    large = {digest: sha256, "size": len(content), "pointerSize": len(text)}
    return found | {git_id: git_hash(text.encode()), "lfs": large}
