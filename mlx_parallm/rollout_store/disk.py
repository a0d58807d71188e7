"""Free space on a run's disk: below the reserve nothing more is begun, so that nothing ends half-written."""

import os
from pathlib import Path

GB = 10**9
RESERVE_GB = 1.0
RESERVE_SHARE = 0.05  # of a small disk


def free_bytes(directory: Path) -> int:
    """What this user may still write on the disk of an existing directory. Raises OSError."""
    status = os.statvfs(directory)
    return status.f_bavail * status.f_frsize


def reserve_bytes(directory: Path, reserve_gb: float | None) -> int:
    """`rollouts.min_free_gb` in bytes; None = 1 GB, or 5 % of a disk under 20 GB. 0 = no reserve. Raises OSError."""
    if reserve_gb is not None:
        return round(reserve_gb * GB)
    status = os.statvfs(directory)
    return round(min(RESERVE_GB * GB, RESERVE_SHARE * status.f_blocks * status.f_frsize))


def shortage(directory: Path, reserve: int) -> str | None:
    """What is wrong with the free space, in words; None while `reserve` bytes are free, or when it is 0."""
    try:
        free = free_bytes(directory) if reserve else 0
    except OSError as error:
        return f"the disk of {directory} cannot be asked: {error.strerror or error}"
    if free >= reserve:
        return None
    return (
        f"{free / GB:.2f} GB are free on the disk of {directory}, less than the {reserve / GB:.2f} GB that stay free"
        " (rollouts.min_free_gb): free some space"
    )
