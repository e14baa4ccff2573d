"""A model on the Hugging Face hub: its headers, and requested parts of its weights, by HTTP ranges.

Everything goes through huggingface-hub, so that its settings hold: HF_ENDPOINT, HF_TOKEN, HF_HOME,
HF_HUB_OFFLINE, HF_HUB_DOWNLOAD_TIMEOUT, proxies. It is imported only here and only when needed.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardmlx.compat import hub_transport_error
from shardmlx.errors import UserError
from shardmlx.modelfiles.safetensors_header import (
    INDEX_FILE,
    LENGTH_BYTES,
    Header,
    header_length,
    parse_header,
)
from shardmlx.modelfiles.sources import CONFIG_FILE, Directory

if TYPE_CHECKING:
    from huggingface_hub.hf_api import ModelInfo

_FIRST_BYTES = 8 * 1024
"""Bytes of a file that are asked for first: most headers are no longer."""

_CONNECTIONS = 8
_ATTEMPTS = 3  # a connection that breaks is tried again
_PAUSE = 0.3  # seconds, once after the first attempt and twice after the second
_OFFLINE = "no internet? give a local directory"
_KEY_FILES = (CONFIG_FILE, INDEX_FILE, "model.safetensors")


class Unreachable(UserError):
    """The hub does not answer, or must not be asked; the cache may have the answer."""


class _Broken(Unreachable):
    """A connection that broke or failed; the next one may hold."""


def find_repository(name: str, revision: str | None) -> Directory | Repository:
    """Find a repository on the hub, or its snapshot in the cache if the hub cannot be asked."""
    from huggingface_hub import HfApi, constants, try_to_load_from_cache

    try:
        with hub_errors(name, revision):
            timeout = constants.HF_HUB_ETAG_TIMEOUT
            info = HfApi().model_info(name, revision=revision, timeout=timeout)
        return Repository(name, revision, info)
    except Unreachable as error:
        cached = (try_to_load_from_cache(name, file, revision=revision) for file in _KEY_FILES)
        snapshot = next((Path(path).parent for path in cached if isinstance(path, str)), None)
        if snapshot is None:
            raise no_directory(name, error) from None
        found = Directory(snapshot)
        found.name = name
        found.revision = snapshot.name
        found.note = f"from the cache: {error}"
        found.missing = f"the cache does not have it, and {error}"
        return found


def no_directory(name: str, error: Unreachable) -> UserError:
    """Return the error for a model that is not here, if the hub cannot be asked."""
    return UserError(f"there is no directory {name} here, and {error.problem}", error.remedy)


class Repository:
    """The files of one commit on the hub."""

    note = ""
    missing = "the repository is incomplete: tell its owner, or try another --revision"
    paths: Mapping[str, Path]

    def __init__(self, name: str, asked: str | None, info: ModelInfo) -> None:
        self.name = name
        self._asked = asked
        self.revision = info.sha
        self.files: Sequence[str] = [each.rfilename for each in info.siblings or ()]
        self.paths = {}

    def where(self, file: str) -> str:
        """Return how messages name a file of the repository."""
        return f"{self.name}/{file}"

    def read(self, file: str) -> bytes:
        """Read a small file through the cache, as huggingface-hub downloads it, without a bar."""
        utils = _hub_utils()
        had_bars = not utils.are_progress_bars_disabled()
        utils.disable_progress_bars()
        try:
            return self.fetch(file).read_bytes()
        finally:
            if had_bars:
                utils.enable_progress_bars()

    def fetch(self, file: str) -> Path:
        """Fetch all of a file; return its path in the cache of huggingface-hub."""
        from huggingface_hub import hf_hub_download

        with hub_errors(self.name, self.revision):
            # Download by the requested name, from which the cache learns the commit.
            return Path(hf_hub_download(self.name, file, revision=self._asked))

    def headers(self, files: Sequence[str]) -> Iterable[Header | UserError]:
        """Return the header of each file, or why it cannot be read, over several connections."""
        with ThreadPoolExecutor(_CONNECTIONS) as pool:
            return list(pool.map(self._header, files))

    def _header(self, file: str) -> Header | UserError:
        data, size = self._range(file, 0, _FIRST_BYTES)
        try:
            end = LENGTH_BYTES + header_length(data[:LENGTH_BYTES], size, self.where(file))
            if len(data) < end:
                data += self.part(file, len(data), end - len(data))
            return parse_header(data[LENGTH_BYTES:end], size, self.where(file))
        except Unreachable:
            raise
        except UserError as error:
            return error

    def part(self, file: str, start: int, count: int) -> bytes:
        """Return so many bytes of a file, fewer if it ends before."""
        return self._range(file, start, start + count)[0]

    def _range(self, file: str, start: int, stop: int) -> tuple[bytes, int]:
        """Return bytes ``start`` to ``stop`` of a file, fewer if it ends before, and its size."""
        sizes = [0]
        data = b"".join(self.stream(file, start, stop, sizes.append))
        return data, sizes[-1]

    def stream(
        self, file: str, start: int, stop: int, told: Callable[[int], None] = lambda size: None
    ) -> Iterator[bytes]:
        """Yield a file's bytes; ``told`` gets its size. Reconnects, or raises ``Unreachable``."""
        from huggingface_hub import constants

        attempt = 0
        while start < stop:
            try:
                with (
                    hub_errors(self.name, self.revision),
                    self._response(file, start, stop) as (size, chunks),
                ):
                    told(size)
                    stop = min(stop, size)
                    for chunk in chunks:
                        wanted = chunk[: stop - start]
                        start = start + len(wanted)
                        attempt = 0
                        yield wanted
                        if start == stop:
                            return
                if start < stop:
                    raise _Broken(
                        f"{constants.ENDPOINT} ended its answer {stop - start} bytes too soon in "
                        f"{self.where(file)}",
                        "try again",
                    )
            except _Broken:
                attempt += 1
                if attempt == _ATTEMPTS:
                    raise
                time.sleep(attempt * _PAUSE)

    @contextmanager
    def _response(self, file: str, start: int, stop: int) -> Iterator[tuple[int, Iterator[bytes]]]:
        """Open an answer: the size of a file, and its bytes from ``start`` on as they come, up to
        ``stop`` or beyond it."""
        from huggingface_hub import constants, hf_hub_url

        utils = _hub_utils()
        headers = utils.build_hf_headers() | {
            "Range": f"bytes={start}-{stop - 1}",
            "Accept-Encoding": "identity",  # a range of the stored bytes, not of compressed ones
        }
        url = hf_hub_url(self.name, file, revision=self.revision)
        # Stream, to leave a server that sends the whole file early. huggingface-hub retries after a
        # refusal, but leaves errors in the midst of an answer to the caller.
        with utils.http_stream_backoff(
            "GET",
            url,
            headers=headers,
            timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT,
            max_retries=_ATTEMPTS - 1,
            base_wait_time=_PAUSE,
            retry_on_exceptions=(),
        ) as response:
            if response.status_code == 416 and start == 0:
                yield 0, iter(())  # an empty file has no first byte
                return
            utils.hf_raise_for_status(response)
            given = response.headers.get("Content-Range", "")
            match = re.fullmatch(rf"bytes {start}-\d+/(\d+)", given.strip())
            if response.status_code != 206 or match is None:
                raise UserError(
                    f"{constants.ENDPOINT} sends all of {self.where(file)} when asked for a part",
                    "use another HF_ENDPOINT, or download the model and name its directory",
                )
            yield int(match[1]), response.iter_bytes()


def _hub_utils() -> Any:
    """Return a public module whose export a type checker does not see."""
    return import_module("huggingface_hub.utils")


_LOG_IN = "log in with 'hf auth login', or set HF_TOKEN"


@contextmanager
def hub_errors(name: str, revision: str | None) -> Iterator[None]:
    """Turn huggingface-hub's errors into one line with a remedy, also names without an owner."""
    from huggingface_hub import constants, errors

    endpoint = constants.ENDPOINT
    try:
        if "/" not in name:
            raise errors.HFValidationError
        yield
    except UserError:
        raise
    except errors.HFValidationError:
        raise UserError(
            f"there is no directory {name} here, and it is not a Hugging Face repository "
            "(OWNER/NAME)",
            "give the model's directory, or its repository, like "
            "mistralai/Mistral-7B-Instruct-v0.3",
        ) from None
    except errors.RevisionNotFoundError:
        raise UserError(f"{name} has no revision {revision!r}", "check --revision") from None
    except errors.GatedRepoError:
        raise UserError(
            f"{name} is gated", f"accept its terms at {endpoint}/{name}, then {_LOG_IN}"
        ) from None
    except errors.OfflineModeIsEnabled:
        raise Unreachable("HF_HUB_OFFLINE is set", f"unset it to ask the hub; {_OFFLINE}") from None
    except errors.EntryNotFoundError as error:
        # Also raised for a hub that cannot be reached, if the cache does not have the file.
        raise Unreachable(
            f"the hub does not give {name}: {_first_line(error)}", f"try again; {_OFFLINE}"
        ) from None
    except errors.HfHubHTTPError as error:
        raise _error_of_status(error.response.status_code, name, endpoint) from None
    except hub_transport_error() as error:
        raise _Broken(
            f"{endpoint} does not answer ({_first_line(error)})",
            f"check the network, or HF_ENDPOINT; {_OFFLINE}",
        ) from None
    except (OSError, ValueError) as error:
        raise UserError(
            f"{endpoint} does not give {name}: {_first_line(error)}", "check HF_ENDPOINT"
        ) from None


def _error_of_status(status: int, name: str, endpoint: str) -> UserError:
    """Return the error for an HTTP status that the hub answers with."""
    if status in (401, 404):
        return UserError(
            f"there is no directory {name} here, and no model {name} at {endpoint}",
            f"check the name; if it is private, {_LOG_IN}",
        )
    if status == 403:
        return UserError(f"{endpoint} does not let you read {name}", _LOG_IN)
    kind = Unreachable if status >= 500 or status == 429 else UserError
    remedy = "try again later, or set HF_ENDPOINT to a mirror"
    return kind(f"{endpoint} answers with status {status} for {name}", remedy)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(":. ") if lines else type(error).__name__
