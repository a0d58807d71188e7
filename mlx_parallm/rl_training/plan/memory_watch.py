"""The preflight's memory against the machine before a run, and against the run meanwhile."""

import resource
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx

from mlx_parallm.errors import ConfigError
from mlx_parallm.rl_training.events import RunEvents, StepFinished
from mlx_parallm.rl_training.plan.preflight import (
    PROCESS_BYTES,
    TIGHT,
    MemoryEstimate,
    PlannedRun,
    in_words,
)
from mlx_parallm.rl_training.step.memory import Lengths
from mlx_parallm.system.device.traits import arrays_are_in_the_process
from mlx_parallm.system.footprint import others_holding
from mlx_parallm.system.hardware import memory_present
from mlx_parallm.system.log import get_logger
from mlx_parallm.system.terminal import Console

log = get_logger("memory")

OFF = 0.15
SMALL = 64 * 2**20
"""Further difference that is not worth a warning: that of a small model is made by
single arrays."""


class MemoryWatch:
    """One run's."""

    def __init__(self, run: PlannedRun) -> None:
        self._run = run
        self._seen = Lengths(0, 0)
        self._peak = 0
        # sequences that were sampled since the last update, whose publish empties the prefix cache
        self._cached = self._most_cached = 0
        self._trained = False
        # A program, or a notebook, may hold more than a process of the daemon's: torch, the model
        # of an earlier run.
        together = arrays_are_in_the_process()
        self._others = max(0, measured_bytes([]) - PROCESS_BYTES) if together else 0

    @classmethod
    def checked(cls, run: PlannedRun, *, processes: int = 1) -> "MemoryWatch":
        """Raises ConfigError: the longest sequences that the configuration allows need more than
        this machine has."""
        needed, (free, whole) = processes * needed_bytes(run.least.memory), memory_present()
        if needed > whole:
            raise ConfigError(run.least.too_little_memory(needed, whole))
        if needed > min(TIGHT * whole, free):
            others = others_holding()
            log.warning(
                "little memory to spare: mlx_parallm train --dry-run measures what the run needs",
                needed_at_most=in_words(needed),
                present=in_words(whole),
                free=in_words(free),
                **({"held_by_others": ", ".join(others)} if others else {}),
            )
        return cls(run)

    def subscribe(self, events: RunEvents) -> None:
        events.subscribe(StepFinished, self.add)

    def add(self, event: StepFinished) -> None:
        """The lengths and the peak of one step."""
        line, batch = event.line, event.batch
        seen = self._seen.with_batch(batch, self._run.placeholder)
        if line.get("sequences") and not batch.sequences:  # how long they were is not known
            seen = self._run.longest
        self._seen, self._trained = seen, self._trained or bool(batch.sequences)
        self._cached += round(line.get("sequences") or 0)
        self._most_cached = max(self._most_cached, self._cached)
        if line.get("optimizer_updates"):
            self._cached = 0
        self._peak = max(self._peak, measured_bytes([event.line]) - self._others)

    @property
    def predicted(self) -> int:
        """Bytes, with the longest sequences that were seen so far, and all that stayed in the
        prefix cache."""
        run = replace(self._run, lengths=self._seen, cached=self._most_cached)
        return needed_bytes(run.memory)

    def health(self) -> str | None:
        """Return a sentence if more is used than the preflight predicted; else None."""
        if self._peak <= self.predicted * (1 + OFF) + SMALL:
            return None
        peak, predicted = in_words(self._peak), in_words(self.predicted)
        key = "rl_training.token_budget" if self._trained else "server.prefix_cache_bytes"
        return f"memory: {peak} at the peak, {predicted} predicted; {key} lowers it"

    def tell(self, console: Console) -> None:
        """Print the comparison, at the end of a run."""
        if not self._peak:
            return
        peak, predicted = in_words(self._peak), in_words(self.predicted)
        if self.health():
            log.warning("the preflight predicted too little", peak=peak, predicted=predicted)
        text = f"memory: {peak} at the peak ({predicted} predicted)"
        console.print(text, soft_wrap=not console.is_terminal, markup=False, highlight=False)


def needed_bytes(estimate: MemoryEstimate) -> int:
    """Return the bytes that must fit into `hardware.memory_present`: a GPU's memory holds MLX's
    arrays only."""
    return estimate.total if arrays_are_in_the_process() else estimate.of_mlx


def measured_bytes(lines: Sequence[Mapping[str, Any]]) -> int:
    """Return the measured peak that `needed_bytes` predicts: of this process (resident), or of
    MLX's arrays in the steps with these lines."""
    if arrays_are_in_the_process():
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
    return max([mx.get_peak_memory(), *(int(line["memory_gb"] * 1e9) for line in lines)])
