"""The serving half of the process, as a run uses it: `PolicyServer`, and `open_serving`, which lets
it answer with the policy in training."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from mlx_parallm.execution.prompt_images import ImageReader
from mlx_parallm.models.adapters.adapter import LoraPair
from mlx_parallm.models.loading import LoadedModel
from mlx_parallm.rl_training.commands import RunCommands
from mlx_parallm.rl_training.publish.rollback import RollbackService
from mlx_parallm.rl_training.sources import POLICY, RolloutSource, Served
from mlx_parallm.rl_training.step.policy import TrainedPolicy
from mlx_parallm.system.serve_priority import Turns
from mlx_parallm.weights import PublishReport, SharedWeights, VersionArchive


class PolicyServer(Served, Protocol):
    """The serving half of the process: `daemon.Serving`."""

    @property
    def url(self) -> str: ...
    @property
    def needs_key(self) -> bool: ...
    @property
    def model_path(self) -> Path: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def image_reader(self) -> ImageReader | None: ...
    @property
    def turns(self) -> Turns: ...
    def page_urls(self, *, with_key: bool) -> Sequence[str]: ...
    def listen(
        self,
        sources: Iterable[RolloutSource],
        rollbacks: RollbackService,
        routers: Iterable[Any],
        *,
        run: Path,
        commands: RunCommands,
    ) -> None: ...
    def load(self, *, quantize: bool) -> LoadedModel: ...
    def open(
        self,
        loaded: LoadedModel,
        weights: SharedWeights,
        *,
        adapters: Mapping[str, Mapping[str, LoraPair]],
        main_adapter: str | None,
        trains_base: bool,
        adapter_roots: Sequence[Path],
        recorded: Collection[str],
    ) -> None: ...
    def observe_publish(self, report: PublishReport) -> None: ...
    def watch_tools(self, counts: Callable[[], Mapping[str, float]]) -> None: ...
    def check(self) -> None: ...
    def check_memory(self) -> None: ...
    def memory_health(self) -> str | None: ...
    def close(self) -> None: ...


def open_serving(
    serving: PolicyServer,
    loaded: LoadedModel,
    policy: TrainedPolicy,
    *,
    version: int,
    keep_versions: int,
    archive: VersionArchive | None = None,
    adapter_roots: Sequence[Path] = (),
) -> SharedWeights:
    """Let the server answer with the trained weights, as `version`. Arguments:
    `SharedWeights`, `daemon.Serving`."""
    if policy.lora:
        weights = SharedWeights(
            loaded.model,
            policy=POLICY,
            version=version,
            keep_versions=keep_versions,
            archive=archive,
        )
        adapters = {POLICY: policy.adapter()}
    else:
        weights = SharedWeights(loaded.model, version=version - 1, keep_versions=1)
        weights.publish_parameters(policy.full_parameters())
        adapters = {}
    main_adapter = POLICY if policy.lora else None
    serving.open(
        loaded,
        weights,
        adapters=adapters,
        main_adapter=main_adapter,
        trains_base=not policy.lora,
        adapter_roots=adapter_roots,
        recorded=policy.experts.recorded,
    )
    return weights
