"""Memory of images."""

from dataclasses import dataclass
from typing import ClassVar

from mlx_parallm.models.images.tower_shape import TowerShape
from mlx_parallm.rl_training.plan.model_shape import FLOAT, ModelShape
from mlx_parallm.rl_training.step.memory import Lengths
from mlx_parallm.system.device.traits import writes_attention_scores

USUAL_IMAGE = 1024
"""Tokens of the largest image if the part that sees is trained and no row was seen yet."""


def usual_tokens(eye: TowerShape | None, prompt: int) -> int:
    """Return the tokens of the images of a prompt of so many tokens, before a row was seen."""
    return 0 if eye is None or eye.train == "none" else min(prompt, USUAL_IMAGE)


@dataclass(frozen=True)
class PlannedImages:
    """The images of a step whose prompts are as long as `longest`, and of the server's forward.
    `prompts`: of a step."""

    part: ClassVar[str] = "training: images"
    shape: ModelShape
    longest: Lengths
    prompts: int

    def forward(self) -> int:
        """Bytes of the server's forward through the tower."""
        eye, tokens = self.shape.eye, self.longest.largest
        if eye is None or not tokens:
            return 0
        return eye.forward_bytes(tokens, self.shape.activation, scores=writes_attention_scores())

    def features(self, *, gradients: bool) -> int:
        """Bytes of the features of a step's images, and of their gradients if they are trained."""
        eye, longest = self.shape.eye, self.longest
        if eye is None or not longest.largest:
            return 0
        numbers = self.prompts * longest.shown * eye.features
        trained = gradients and eye.train != "none"
        return int(numbers * self.shape.activation) + FLOAT * numbers * trained

    def training(self, others: int) -> int:
        """Bytes of a step's images: features, and passes through the tower as far as they need
        more than the language part (`others`), which comes before and after them."""
        eye, tokens = self.shape.eye, self.longest.largest
        if eye is None or not tokens:
            return 0
        passes = max(self.forward(), eye.backward_bytes(tokens, self.shape.activation))
        return self.features(gradients=True) + max(0, passes - others)
