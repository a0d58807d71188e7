"""The weights as the engine last saw them under their read lock."""

from collections.abc import Callable, Hashable

from mlx_parallm.engine.sequence import Sequence
from mlx_parallm.weights import SharedWeights, WeightsView


class PresentWeights:
    """
    Args:
        forget_others: called after a change of weights with those whose prefixes and images may be
            kept: (adapter's serial, whether a request names its version) each, and the base's
            serial.
    """

    def __init__(
        self,
        weights: SharedWeights,
        forget_others: Callable[[set[tuple[int, bool]], int], None],
    ) -> None:
        self._weights, self._forget_others = weights, forget_others
        self.version = self._revision = self.base_serial = -1

    def note(self, view: WeightsView) -> None:
        """Note what is served now, under the read lock."""
        if view.revision == self._revision:
            return
        self.version, self._revision = view.policy_version, view.revision
        self.base_serial = view.base_serial
        newest = {(adapter.serial, False) for adapter in view.adapters.values()} | {(0, False)}
        pinned = {(serial, True) for serial in self._weights.history.serials}
        self._forget_others(newest | pinned, view.base_serial)

    def of(self, sequence: Sequence) -> Hashable:
        """Identify the weights that compute the sequence now: its adapter's arrays and the base's.

        A pinned version shares no prefix with requests that had it as the newest: a publish may
        have come while their prompts were computed.
        """
        adapter = sequence.adapter
        arrays = (0, False) if adapter is None else (adapter.weights.serial, adapter.pinned)
        return (*arrays, self.base_serial)
