"""`TowerShape`: a tower's dimensions, and the memory to compute with it.

The counts below were fitted to peaks of MLX 0.32.4 on a CPU (`mx.get_peak_memory`): towers of
Qwen2-VL, Qwen2.5-VL, Qwen3-VL and SigLIP of six shapes each, 64 to 320 wide, 256 to 1,024 patches.
The forward was within 9 % for 20 of 24 and 16 % for all, the backward within 12 % and 21 %.
"""

from dataclasses import dataclass
from typing import Literal

FLOAT = 4


@dataclass(frozen=True)
class TowerShape:
    """
    Attributes:
        token_id: of an image's tokens in a prompt.
        train: `vision.train`.
        pixels: numbers of a patch.
        per_token: patches of a token.
        most: patches of the largest image that the processor makes.
        together: patches, at most, that are computed together; the others one group after another.
        span: patches, at most, of which each sees the others.
        features: numbers of a token's features.
        levels: blocks of which features are made too (DeepStack).
        trained: numbers of the part that sees that are trained.
    """

    token_id: int
    train: Literal["none", "connector", "tower"]
    blocks: int
    hidden: int
    intermediate: int
    heads: int
    pixels: int
    per_token: int
    most: int
    together: int
    span: int
    features: int
    levels: int = 0
    trained: int = 0

    def _patches(self, tokens: int) -> tuple[int, int, int]:
        """Return the patches of an image of so many tokens, those that are computed together, and
        heads · span of each."""
        patches = min(self.most, tokens * self.per_token)
        return patches, min(self.together, patches), self.heads * min(self.span, patches)

    def forward_bytes(self, tokens: int, width: float, *, scores: bool) -> int:
        """Return what computing the features of an image takes. `width`: bytes of an activation;
        `scores`: attention makes them, as on a CPU."""
        _, together, seen = self._patches(tokens)
        each = 0.55 * self.pixels + (22 + 6 * self.levels) * self.hidden + 1.25 * self.intermediate
        return int(together * width * (each + 0.92 * seen * scores))

    def backward_bytes(self, tokens: int, width: float) -> int:
        """Return the memory of a gradient of an image's features, beside the trained weights: each
        block's input and one block, or the connector."""
        if self.train == "none":
            return 0
        merged = self.per_token * self.hidden
        if self.train == "connector":
            numbers = CONNECTOR * tokens * ((1 + self.levels) * merged + self.features)
            return int(width * numbers + FLOAT * self.trained)
        patches, together, seen = self._patches(tokens)
        in_mlp = 36 * self.hidden + 9.5 * self.intermediate + 2.4 * seen
        in_attention = 17 * self.hidden + 8 * self.intermediate + 3.5 * seen
        each = 0.63 * self.pixels + 6 * self.levels * self.hidden + max(in_mlp, in_attention)
        waiting = patches * self.blocks * self.hidden
        # those of the mergers are made before the blocks', and wait for them
        mergers = self.levels * merged * (merged + self.features // (1 + self.levels))
        made = 0.37 * self.trained * -(-patches // together) + 0.63 * min(mergers, self.trained)
        return int(width * (waiting + together * each) + FLOAT * made)


CONNECTOR = 4
"""Arrays of a token's patches and of its features that a gradient of the connector holds: 1 to 6,
and less than the forward through the tower."""
