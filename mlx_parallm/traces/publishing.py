"""A data set to the Hugging Face hub, after a last look for secrets."""

from pathlib import Path

from mlx_parallm.errors import TraceError
from mlx_parallm.traces.privacy import leftovers

SHOWN = 5


def check_leftovers(directory: Path) -> None:
    """Raises TraceError: a secret still stands in the files of a data set."""
    found = list(leftovers(sorted(directory.glob("*.jsonl"))))
    if found:
        more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
        raise TraceError(f"not pushed: secrets still stand in {'; '.join(found[:SHOWN])}{more}")


def push_dataset(directory: Path, repository: str) -> str:
    """Upload a data set's directory as a private data set; return its URL. Raises TraceError: the hub refuses."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError
    from huggingface_hub.errors import HTTPError as TransportError

    try:
        api = HfApi()
        url = api.create_repo(repository, repo_type="dataset", private=True, exist_ok=True)
        api.upload_folder(repo_id=repository, repo_type="dataset", folder_path=directory)
    except (HfHubHTTPError, HFValidationError, TransportError, OSError) as error:
        raise TraceError(f"the hub does not take {repository}: {error}") from error
    return str(url)
