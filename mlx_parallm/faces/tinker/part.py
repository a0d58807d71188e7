"""Tinker's training API: an unmodified `tinker` SDK samples from this server and trains LoRA models
on it. This is the part that the daemon starts: the routes at once, and behind them a learner once
the model is loaded.

    routes.py       sessions, promises, training and sampling below /api/v1 · rest.py: runs,
                    checkpoints, downloads
    service.py      models, order of requests (the server's thread) · sessions.py: clients ·
                    sampling.py: samples
    promises.py     results that wait for their clients · pace.py: how much the event loop does in
                    one turn
    learner.py      the thread that trains all models · losses.py, data.py: one request's work for
                    it
    samplers.py     the weights that samples are drawn with · checkpoints.py: tinker:// names and
                    their directories
    run_log.py      staleness, the gap between sampler and learner · recorder.py: the files of a run
    wire.py         protobuf messages (wire.proto) and tensors · wire_counts.py: how many of them ·
                    bodies.py: JSON bodies
"""

from collections.abc import Sequence
from pathlib import Path

from mlx_parallm.config.server import ServerConfig
from mlx_parallm.engine.client import EngineClient
from mlx_parallm.errors import EngineUnavailableError
from mlx_parallm.faces.tinker.checkpoints import Checkpoints
from mlx_parallm.faces.tinker.config import TinkerConfig
from mlx_parallm.faces.tinker.learner import TinkerLearner, TrainingOf
from mlx_parallm.faces.tinker.recorder import RecorderOptions, RunRecorder
from mlx_parallm.faces.tinker.rest import DOWNLOADS, add_rest_routes
from mlx_parallm.faces.tinker.routes import add_routes, tinker_router
from mlx_parallm.faces.tinker.samplers import SamplerShelf, SamplerWeights
from mlx_parallm.faces.tinker.sampling import Sampling
from mlx_parallm.faces.tinker.service import TinkerService
from mlx_parallm.models.loading import LoadedModel
from mlx_parallm.models.lora import linear_shapes
from mlx_parallm.server.app import AddedRouter
from mlx_parallm.system.serve_priority import Turns
from mlx_parallm.weights import SharedWeights


class TinkerPart:
    """See `daemon.ServedPart`.

    Args:
        training_of: as in `TinkerLearner`.
    """

    def __init__(
        self,
        config: TinkerConfig,
        server: ServerConfig,
        training_of: TrainingOf,
        recorded: RecorderOptions,
    ) -> None:
        self._config, self._server = config, server
        self._training_of, self._recorded = training_of, recorded
        self._learner: TinkerLearner | None = None
        self._recorder: RunRecorder | None = None
        self._service: TinkerService | None = None
        self._sampling: Sampling | None = None
        router = tinker_router()
        add_routes(router, self._ready, self._ready_to_sample)
        add_rest_routes(router, self._ready)
        self.router = AddedRouter(router, public=(DOWNLOADS,))

    def loaded(self, base: LoadedModel, turns: Turns) -> None:
        """Take the base, before its tree is wrapped for serving."""
        length = min(self._server.max_model_len or base.max_model_len, base.max_model_len)
        self._learner = TinkerLearner(base, self._training_of, turns, length)

    def opened(self, weights: SharedWeights, engine: EngineClient) -> None:
        """Answer from now on."""
        assert self._learner is not None, "loaded() comes first"
        names, tokenizer = base_names(self._server.served_model_names, self._learner.base)
        tinker = self._config
        checkpoints = Checkpoints(tinker.directory, min_free_gb=self._recorded.min_free_gb)
        samplers = SamplerWeights(
            weights,
            linear_shapes(self._learner.base.model),
            engine.uses,
            kept=tinker.kept_samplers,
            total=tinker.kept_samplers * tinker.max_models,
        )
        checkpoints.removed = samplers.drop
        weights.shelf = SamplerShelf(checkpoints, samplers, names)
        self._recorder = RunRecorder(self._recorded, checkpoints)
        service = TinkerService(
            tinker,
            self._learner,
            samplers,
            engine,
            checkpoints,
            self._recorder,
            names=names,
            tokenizer_id=tokenizer,
        )
        self._sampling = Sampling(service)
        self._service = service

    def close(self) -> None:
        """End the learner after the request that it works on, then the runs' files."""
        if self._learner is not None:
            self._learner.close()
        if self._recorder is not None:
            self._recorder.close()

    def run_directories(self) -> tuple[Path, ...]:
        """The directories of the newest runs, the newest first."""
        return () if self._recorder is None else self._recorder.directories

    def _ready(self) -> TinkerService:
        if self._service is None:
            raise EngineUnavailableError("the model is still loading")
        return self._service

    def _ready_to_sample(self) -> Sampling:
        self._ready()
        assert self._sampling is not None
        return self._sampling


def base_names(aliases: Sequence[str], base: LoadedModel) -> tuple[tuple[str, ...], str]:
    """The names of the base, the one that answers show first, and the source from which a client
    loads the tokenizer.

    The SDK loads the tokenizer in the client's process from the model's name: a directory's path
    for a local model. It reads a name with two slashes as ORG/MODEL/VARIANT, so a path with two
    gets a third that changes nothing.
    """
    local = Path(base.name).expanduser().exists() or base.name.startswith("builtin:")
    name = base.name
    if local:
        path = base.path.resolve()
        name = f"{path.parent}/./{path.name}" if str(path).count("/") == 2 else str(path)
    others = (
        base.name,
        str(base.path),
        str(base.path.resolve()),
        *aliases,
    )
    return tuple(dict.fromkeys((name, *others))), name
