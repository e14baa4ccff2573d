"""A small hub on this machine: the endpoints that huggingface-hub asks, and what they served.

Weights are redirected to another host name, as the hub redirects to its content network, and are
never there: a file is a header and as many zeros as it claims.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass(frozen=True)
class File:
    """A file of ``size`` bytes: ``head``, then zeros. ``is_large``: kept by Git LFS."""

    head: bytes
    size: int
    is_large: bool = False

    def read(self, start: int, stop: int) -> bytes:
        stop = min(stop, self.size)
        return self.head[start:stop].ljust(max(stop - start, 0), b"\0")

    @property
    def checksum(self) -> str:
        """A sha256 as far as its form goes: nobody hashes 240 GB of zeros here."""
        kind = hashlib.sha256 if self.is_large else hashlib.sha1
        return kind(self.head).hexdigest()


def text_file(content: Any) -> File:
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    return File(data, len(data))


def safetensors_file(tensors: Mapping[str, tuple[str, list[int], int]]) -> File:
    """Return a large file with these tensors: name -> (dtype, shape, bytes)."""
    header, end = {}, 0
    for name, (dtype, shape, nbytes) in tensors.items():
        offsets = [end, end + nbytes]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        end += nbytes
    text = json.dumps(header).encode()
    return File(struct.pack("<Q", len(text)) + text, 8 + len(text) + end, is_large=True)


@dataclass
class Hub:
    """Repositories by name, how the hub behaves, and what it was asked.

    ``tokens`` opens all that is ``gated`` (listed for all, read by few) or ``private``.
    """

    repositories: dict[str, dict[str, File]] = field(default_factory=dict)
    revisions: set[str] = field(default_factory=lambda: {"main", COMMIT})
    gated: set[str] = field(default_factory=set)
    private: set[str] = field(default_factory=set)
    token: str = "hf_secret"
    ignores_ranges: bool = False
    truncates: bool = False
    drops: int = 0
    """Number of answers of the content network that break off; later ones do not."""
    status: int = 0
    """Status that is given instead of any answer."""
    port: int = 0
    bytes_served: int = 0
    requests: list[str] = field(default_factory=list)
    tokens_seen_by_cdn: list[str | None] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def cdn(self) -> str:
        return f"http://localhost:{self.port}/cdn"


class _Counted:
    """A stream that counts what is written: headers and bodies."""

    def __init__(self, stream: Any, hub: Hub) -> None:
        self._stream, self._hub = stream, hub

    def write(self, data: bytes) -> int:
        with self._hub.lock:
            self._hub.bytes_served += len(data)
        return int(self._stream.write(data))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def setup(self) -> None:
        super().setup()
        self.wfile = _Counted(self.wfile, self.hub)  # type: ignore[assignment]

    def log_message(self, format: str, *arguments: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        with self.hub.lock:
            self.hub.requests.append(f"{self.command} {path}")
        if self.hub.status:
            self._refuse(self.hub.status, "")
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", path):
            self._list(match[1], match[2] or "main")
        elif match := re.fullmatch(r"/cdn/([^/]+/[^/]+)/(.+)", path):
            with self.hub.lock:
                self.hub.tokens_seen_by_cdn.append(self.headers.get("Authorization"))
            self._send(self.hub.repositories[match[1]][match[2]], {})
        elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self._resolve(*match.groups())
        else:
            self._refuse(404, "")

    def _is_known(self, name: str, revision: str) -> bool:
        has_token = self.headers.get("Authorization") == f"Bearer {self.hub.token}"
        if name not in self.hub.repositories or (name in self.hub.private and not has_token):
            # The hub does not tell strangers what exists.
            self._refuse(404 if has_token else 401, "RepoNotFound")
            return False
        if revision not in self.hub.revisions:
            self._refuse(404, "RevisionNotFound")
            return False
        return True

    def _list(self, name: str, revision: str) -> None:
        if not self._is_known(name, revision):
            return
        siblings = []
        for file, content in self.hub.repositories[name].items():
            entry: dict[str, Any] = {"rfilename": file, "size": content.size}
            if content.is_large:
                sha = {"sha256": content.checksum, "size": content.size, "pointerSize": 135}
                entry["lfs"] = sha
            siblings.append(entry)
        listing = {"id": name, "modelId": name, "sha": COMMIT, "tags": [], "siblings": siblings}
        self._send(text_file(listing), {"Content-Type": "application/json"})

    def _resolve(self, name: str, revision: str, file: str) -> None:
        if not self._is_known(name, revision):
            return
        has_token = self.headers.get("Authorization") == f"Bearer {self.hub.token}"
        if name in self.hub.gated and not has_token:
            self._refuse(401, "GatedRepo")
            return
        content = self.hub.repositories[name].get(file)
        if content is None:
            self._refuse(404, "EntryNotFound")
            return
        headers = {"X-Repo-Commit": COMMIT}
        if not content.is_large:
            self._send(content, headers | {"ETag": f'"{content.checksum}"'})
            return
        self.send_response(302)
        headers["X-Linked-Etag"] = f'"{content.checksum}"'
        headers["X-Linked-Size"] = str(content.size)
        headers["Location"] = f"{self.hub.cdn}/{name}/{file}"
        self._end(headers | {"Content-Length": "0"})

    def _send(self, content: File, headers: dict[str, str]) -> None:
        start, stop = 0, content.size
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if asked and not self.hub.ignores_ranges:
            start, stop = int(asked[1]), min(int(asked[2]) + 1, content.size)
            if start >= content.size:
                self.send_response(416)
                self._end({"Content-Range": f"bytes */{content.size}", "Content-Length": "0"})
                return
            self.send_response(206)
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{content.size}"
        else:
            self.send_response(200)
        self._end(headers | {"Content-Length": str(stop - start)})
        if self.command == "HEAD":
            return
        if asked and self._is_cut():
            self.wfile.write(content.read(start, start + (stop - start) // 2))
            self.close_connection = True
            return
        try:
            for position in range(start, stop, 1 << 16):
                self.wfile.write(content.read(position, min(position + (1 << 16), stop)))
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def _is_cut(self) -> bool:
        with self.hub.lock:
            if self.hub.drops:
                self.hub.drops -= 1
                return True
            return self.hub.truncates

    def _refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self._end(
            {"X-Error-Code": code, "Content-Length": "0"} if code else {"Content-Length": "0"}
        )

    def _end(self, headers: Mapping[str, str]) -> None:
        for key, value in headers.items():
            self.send_header(key, value)
        self.end_headers()


@contextmanager
def serve(hub: Hub) -> Iterator[Hub]:
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    hub.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
