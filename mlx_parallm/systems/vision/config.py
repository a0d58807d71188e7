"""[vision]: images in requests, for models that read them."""

from typing import Literal, Self

from pydantic import Field, model_validator

from mlx_parallm.config.environment import Section


class VisionConfig(Section):
    enabled: Literal["auto"] | bool = "auto"
    """Read images (docs/vision.md). "auto": if the model has a tower that is known here and the
    extra `vision` is installed; true: it is an error where not; false: only the model's text part
    is loaded."""
    train: Literal["none", "connector", "tower"] = "none"
    """Trained modules of the part that sees, beside the language part: none, the
    connector between the two, or the tower and the connector. With LoRA their linear layers get
    their own adapters, whatever `rl_training.lora.target_modules` says; with full weights they
    learn as they are. Gemma 3's connector has no such layer: it learns with full weights alone."""
    max_images: int = Field(16, ge=1)
    """Images of one request."""
    max_image_bytes: int = Field(20 << 20, ge=1)
    """Bytes of one image as it is sent."""
    max_pixels: int = Field(40_000_000, ge=1)
    """Pixels of one image, as its file says: a picture of 40 megapixels takes 120 MB while it is
    read."""
    hosts: tuple[str, ...] = ()
    """Hosts from which images are fetched by http and https, by their exact names. None: the
    server fetches no image."""
    directories: tuple[str, ...] = ()
    """Directories from which images are read by file URLs. None: a request reads no file."""
    timeout_s: float = Field(10.0, gt=0)
    """Time for fetching one image."""
    feature_cache_bytes: int = Field(512 << 20, ge=0)
    """Memory for features of images that later prompts may have again, and with `train =
    "connector"` once more, in the server and in the trainer each, for what the tower makes of
    images."""

    @model_validator(mode="after")
    def _sees(self) -> Self:
        if self.enabled is False and self.train != "none":
            raise ValueError(f'train = "{self.train}" needs the part that sees: enabled is false')
        return self
