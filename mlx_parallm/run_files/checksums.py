"""SHA256SUMS of a checkpoint: written with it, compared when it is read. No MLX."""

from pathlib import Path

from mlx_parallm.errors import CheckpointError
from mlx_parallm.run_files.directory import checkpoints
from mlx_parallm.system.files import inside, sha256_of

CHECKSUMS_FILE = "SHA256SUMS"  # as `sha256sum -c` reads it


def write_checksums(directory: Path) -> None:
    """Write the checksums of all files that lie in `directory` and below it."""
    files = sorted(
        file.relative_to(directory).as_posix() for file in directory.rglob("*") if file.is_file()
    )
    sums = [f"{sha256_of(directory / file)}  {file}\n" for file in files]
    (directory / CHECKSUMS_FILE).write_text("".join(sums), encoding="utf-8")


def damaged_files(checkpoint: Path) -> list[str] | None:
    """Return the names of the files that differ from their checksums; None: there are no
    checksums, as older versions wrote none. Raises CheckpointError: a file is missing, or the
    checksums cannot be read."""
    sums = checkpoint / CHECKSUMS_FILE
    if not sums.is_file():
        return None
    try:
        expected = [line.split("  ", 1) for line in sums.read_text(encoding="utf-8").splitlines()]
        damaged = [
            name for checksum, name in expected if sha256_of(inside(checkpoint, name)) != checksum
        ]
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{sums}: the checkpoint cannot be checked: {error}") from error
    return damaged if expected else [CHECKSUMS_FILE]


def check_files(checkpoint: Path) -> None:
    """Compare the files with their checksums, if there are any: older versions wrote none.

    Raises CheckpointError: a file is missing or damaged.
    """
    damaged = damaged_files(checkpoint)
    if damaged:
        others = ", ".join(
            path.name for path in checkpoints(checkpoint.parent) if path.name != checkpoint.name
        )
        raise CheckpointError(
            f"{checkpoint}: damaged: {', '.join(damaged)}: the checksum is another than when it"
            " was written. Resume"
            f" from another checkpoint (there: {others or 'none'}); if you changed it yourself,"
            f" remove {CHECKSUMS_FILE}"
        )
