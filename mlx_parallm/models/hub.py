"""The Hugging Face hub: checks before a download, the download, and each of its failures in
words.

    fetch_config    config.json alone: shows the architecture before gigabytes are fetched
    download        the whole checkpoint, after its format and the disk's free space were looked at

Both work from the local cache when the hub cannot be reached.
"""

import shutil
from fnmatch import fnmatch
from pathlib import Path

from huggingface_hub import (
    HfApi,
    constants,
    get_token,
    hf_hub_download,
    snapshot_download,
    try_to_load_from_cache,
)
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    IncompleteSnapshotError,
    LocalEntryNotFoundError,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.errors import HTTPError as TransportError  # also when no answer came at all
from huggingface_hub.hf_api import ModelInfo

from mlx_parallm.errors import ModelError
from mlx_parallm.models.checkpoint_files import check_names
from mlx_parallm.system.log import get_logger

log = get_logger("hub")

PATTERNS = [
    "*.json",
    "model*.safetensors",
    "*.py",
    "*.model",
    "tokenizer.model.*",
    "*.spm",
    "*.tiktoken",
    "*.txt",
    "*.jinja",
]
TIMEOUT_S = 15.0


def fetch_config(repo: str, revision: str | None) -> Path:
    """The local path of the repository's config.json. Raises ModelError."""
    try:
        info = _info(repo, revision)
        if info is None:
            path = hf_hub_download(repo, "config.json", revision=revision, local_files_only=True)
        else:
            _check_files(repo, info)
            path = hf_hub_download(repo, "config.json", revision=info.sha)
    except (TransportError, OSError, ValueError) as error:
        raise ModelError(_what_is_wrong(error, repo, revision)) from error
    return Path(path)


def download(repo: str, revision: str | None, *, fetch: bool = True) -> Path:
    """The local directory of the repository's model files; fetches files that are not in the cache.
    Raises ModelError."""
    try:
        info = _info(repo, revision) if fetch else None
        if info is not None:
            _check_files(repo, info)
            _check_disk(repo, info)
        path = snapshot_download(
            repo, revision=revision, allow_patterns=PATTERNS, local_files_only=info is None
        )
    except (TransportError, OSError, ValueError) as error:
        raise ModelError(_what_is_wrong(error, repo, revision)) from error
    return Path(path)


def _info(repo: str, revision: str | None) -> ModelInfo | None:
    """Commit, file names and sizes; None when the hub cannot be reached."""
    try:
        return HfApi().model_info(repo, revision=revision, files_metadata=True, timeout=TIMEOUT_S)
    except (HfHubHTTPError, HFValidationError) as error:
        if isinstance(error, HFValidationError) or not _busy(error.response.status_code):
            raise
        reason = f"it answers {error.response.status_code}"
    except (TransportError, OSError) as error:
        reason = str(error) or type(error).__name__
    log.warning(
        "the hub cannot be reached: looking into the local cache",
        hub=constants.ENDPOINT,
        reason=reason,
    )
    return None


def _busy(status: int) -> bool:
    return status >= 500 or status == 429


def _sizes(info: ModelInfo) -> dict[str, int]:
    return {file.rfilename: file.size or 0 for file in info.siblings or []}


def _check_files(repo: str, info: ModelInfo) -> None:
    check_names([name for name in _sizes(info) if "/" not in name], repo)


def _check_disk(repo: str, info: ModelInfo) -> None:
    wanted = {
        name: size for name, size in _sizes(info).items() if any(fnmatch(name, p) for p in PATTERNS)
    }
    needed = sum(
        size
        for name, size in wanted.items()
        if not isinstance(try_to_load_from_cache(repo, name, revision=info.sha), str)
    )
    cache = Path(constants.HF_HUB_CACHE)
    existing = next(parent for parent in (cache, *cache.parents) if parent.exists())
    if needed > (free := shutil.disk_usage(existing).free):
        raise ModelError(
            f"{repo!r} needs {needed / 1e9:.1f} GB more in {cache}, where {free / 1e9:.1f} GB are"
            " free: remove models that are not used (`hf cache ls`, `hf cache rm`), or set HF_HOME"
            " to a directory on a larger disk"
        )


def _what_is_wrong(error: Exception, repo: str, revision: str | None) -> str:
    page = f"{constants.ENDPOINT}/{repo}"
    match error:
        case GatedRepoError():
            token = "your token is known to the hub but" if get_token() else "no token is set and"
            return (
                f"{repo!r} is gated: {token} has no access; accept its terms at {page}, then `hf"
                " auth login` (or set HF_TOKEN)"
            )
        case RevisionNotFoundError():
            return (
                f"{repo!r} has no revision {revision!r} (model.revision): branches and tags are at"
                f" {page}/tree/main"
            )
        case RepositoryNotFoundError():
            return _unknown(repo)
        case RemoteEntryNotFoundError():
            return (
                f"{repo!r} has no config.json: not a language model's repository, see"
                f" {page}/tree/main"
            )
        case LocalEntryNotFoundError():
            part = "is only partly" if isinstance(error, IncompleteSnapshotError) else "is not"
            return f"{repo!r} {part} in the local cache and {_unreachable(repo)}"
        case HFValidationError():
            return f"{repo!r} is neither a hub id (owner/name) nor a directory: {error}"
        case HfHubHTTPError():
            return _refused(error, repo)
    return f"{repo!r} cannot be downloaded: {_first_line(error)}"


def _refused(error: HfHubHTTPError, repo: str) -> str:
    status, message = error.response.status_code, error.response.headers.get("X-Error-Message", "")
    # the hub's answer to anonymous requests for missing repositories
    if status == 401 and "credentials" not in message:
        return _unknown(repo)
    if status == 401:
        return (
            f"the hub refuses your token (HF_TOKEN, or {constants.HF_TOKEN_PATH}): `hf auth login`"
            " with a valid one"
        )
    if status == 403:
        return (
            f"your token may not read {repo!r}: give it read access to it at"
            f" {constants.ENDPOINT}/settings/tokens, then"
            " `hf auth login`"
        )
    return f"{repo!r} cannot be downloaded: {_first_line(error)}"


def _unknown(repo: str) -> str:
    page = f"{constants.ENDPOINT}/{repo}"
    return (
        f"no model {repo!r} on the hub: check the name at {page}; if it is private, `hf auth login`"
    )


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), "") or repr(error)


def _unreachable(repo: str) -> str:
    how = (
        "HF_HUB_OFFLINE is set"
        if constants.HF_HUB_OFFLINE
        else f"{constants.ENDPOINT} cannot be reached"
    )
    return (
        f"{how}: go online once, or fetch it on a machine that is (`hf download {repo} --local-dir"
        " DIR`) and set model.base_path = 'DIR'"
    )
