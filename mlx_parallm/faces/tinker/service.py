"""Sessions, models and the order of their requests. Server's thread only; what trains runs on the
learner's.

A model's requests are numbered (`seq_id` 1, 2, …) over forward_backward, optim_step and saves
together, and run in that order; the SDK sends the chunks of one call at once and the first one
last. `(model_id, seq_id)` identifies a request: one that is sent again gets the same promise.
"""

import asyncio
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

from mlx_parallm.engine.client import EngineClient
from mlx_parallm.errors import ParallmError, RefusedError, RequestError
from mlx_parallm.faces.tinker.bodies import (
    AdamBody,
    CreateModelBody,
    CreateSessionBody,
    LoadWeightsBody,
    LoraBody,
    OptimStepBody,
    SaveExternalBody,
    SaveForSamplerBody,
    SaveWeightsBody,
    TinkerBody,
)
from mlx_parallm.faces.tinker.checkpoints import (
    EXTERNAL,
    SAMPLER,
    TRAINING,
    Checkpoints,
    TinkerPath,
    TinkerRun,
    check_name,
)
from mlx_parallm.faces.tinker.config import TinkerConfig
from mlx_parallm.faces.tinker.data import read_batch
from mlx_parallm.faces.tinker.learner import LearnedModel, LoraChoice, TinkerLearner
from mlx_parallm.faces.tinker.promises import (
    Promise,
    PromiseResult,
    Promises,
    failure,
    failure_of,
    json_result,
    protobuf_result,
)
from mlx_parallm.faces.tinker.recorder import RunRecorder
from mlx_parallm.faces.tinker.run_log import SampleRecords, TinkerRunLog
from mlx_parallm.faces.tinker.samplers import INFLIGHT, SamplerWeights
from mlx_parallm.faces.tinker.sessions import ClientSession, Sampler, SamplingSessions
from mlx_parallm.faces.tinker.wire import ForwardBackward, write_output
from mlx_parallm.models.adapters.peft import save_peft
from mlx_parallm.rl_training.step.optimizer import AdamWSettings
from mlx_parallm.server.errors import ServerBusyError
from mlx_parallm.system.log import get_logger

GONE_AFTER_S = 900.0  # without a heartbeat, of which the SDK sends one in 10 s: the client is gone
# then its session is forgotten; one that was finished, after GONE_AFTER_S
FORGOTTEN_AFTER_S = 24 * 3600.0
MOST_QUEUED_BYTES = 1 << 30  # limit on forward_backward bodies that wait
FARTHEST_AHEAD = 4096  # requests of a model that may wait for an earlier one
KEPT_REQUESTS = 65_536  # answered requests of a model that are still known by their number
MOST_SESSIONS = 1024
MOST_CREATED = 16_384  # requests for a model that are still known by their number

log = get_logger("tinker")


@dataclass(eq=False)
class QueuedRequest:
    promise: Promise
    what: str
    work: Callable[[], PromiseResult]
    size: int = 0  # bytes of its body


class TrainedModel:
    """A model of a client, and the requests that wait for their turn."""

    def __init__(self, run: TinkerRun, learned: LearnedModel, run_log: TinkerRunLog) -> None:
        self.run, self.learned, self.log = run, learned, run_log
        self.next_seq = 1
        self.waiting: dict[int, QueuedRequest] = {}
        # kind, content, answer
        self.accepted: OrderedDict[int, tuple[str, bytes, Promise]] = OrderedDict()
        self.last_request = time.time()
        self.live = 0  # sets of weights that were saved without a name
        self.inflight = (0, 0)  # the weights that inflight samplers draw with

    @property
    def weights(self) -> tuple[int, int]:
        """Their optimizer steps, and how often a checkpoint was loaded."""
        return self.learned.step, self.log.generation

    def missing(self, seq_id: int) -> str:
        """Return why request `seq_id` has not begun."""
        return f"waits for request {self.next_seq} of this model" if seq_id in self.waiting else ""


class TinkerService:
    """Sessions, models and samplers of Tinker's clients; the routes call it.

    Args:
        names: names by which clients may ask for the base; answers show the first.
        tokenizer_id: the SDK's source of the tokenizer.
    """

    def __init__(
        self,
        config: TinkerConfig,
        learner: TinkerLearner,
        samplers: SamplerWeights,
        engine: EngineClient,
        checkpoints: Checkpoints,
        recorder: RunRecorder,
        *,
        names: tuple[str, ...],
        tokenizer_id: str,
    ) -> None:
        self.config, self.learner, self.samplers, self.engine = config, learner, samplers, engine
        self.checkpoints, self.names, self.tokenizer_id = checkpoints, names, tokenizer_id
        self.recorder = recorder
        self.promises = Promises(config.max_result_bytes)
        self.records = SampleRecords()
        self.sessions: dict[str, ClientSession] = {}
        self.models: dict[str, TrainedModel] = {}
        self.sampling = SamplingSessions()
        self._creating: dict[tuple[str, int], Promise] = {}
        self._queued_bytes = 0  # bodies that wait
        self._running_bytes = 0  # the part that only waits for the learner

    # ------------------------------------------------------------------ sessions

    @property
    def base_model(self) -> str:
        return self.names[0]

    def create_session(self, body: CreateSessionBody) -> ClientSession:
        """Raises ServerBusyError: MOST_SESSIONS clients have a session already."""
        now = time.time()
        self._forget_sessions(now, FORGOTTEN_AFTER_S)
        if len(self.sessions) >= MOST_SESSIONS:
            self._forget_sessions(now, GONE_AFTER_S)
        if len(self.sessions) >= MOST_SESSIONS:
            raise ServerBusyError(
                f"{len(self.sessions)} sessions are open: close a ServiceClient; try again"
            )
        session = ClientSession(
            str(uuid.uuid4()),
            body.user_metadata,
            body.display_name,
            body.project_id,
            created=now,
            last_seen=now,
        )
        self.sessions[session.session_id] = session
        return session

    def _forget_sessions(self, now: float, unseen_s: float) -> None:
        """Drop the state of clients that are gone for so long, or have finished; their
        checkpoints stay."""
        for session in list(self.sessions.values()):
            if now - session.last_seen > (GONE_AFTER_S if session.finished else unseen_s):
                for model_id in session.models:
                    self.unload(model_id)
                for sampler_id in session.samplers:
                    self.sampling.drop(sampler_id)
                for key in [key for key in self._creating if key[0] == session.session_id]:
                    del self._creating[key]
                del self.sessions[session.session_id]

    def session(self, session_id: str, *, status: int = 404) -> ClientSession:
        """Raises RefusedError with that status: it is unknown."""
        session = self.sessions.get(session_id)
        if session is None:
            raise RefusedError(
                f"session {session_id!r} is unknown: the server was restarted. Make a new"
                " ServiceClient;"
                " create_training_client_from_state continues from a checkpoint",
                status,
            )
        session.last_seen = time.time()
        return session

    def finish(self, session_id: str, reason: str) -> None:
        """The client is done: its models and live weights give their memory back. Checkpoints
        stay."""
        session = self.session(session_id)
        session.finished = reason
        for model_id in session.models:
            self.unload(model_id)

    def unload(self, model_id: str) -> None:
        """Forget a model, after its submitted requests."""
        model = self.models.pop(model_id, None)
        if model is not None:
            lost = failure(
                f"model {model_id} was unloaded before this request's turn", category="user"
            )
            for waiting in model.waiting.values():
                self._queued_bytes -= waiting.size
                self.promises.resolve(waiting.promise, lost)
            self.sampling.drop_live(model_id)

            def ended() -> None:
                self.samplers.drop_run(model_id)
                model.log.recorded.end()

            self.learner.submit(f"unloads {model_id}", ended)

    def model(self, model_id: str) -> TrainedModel:
        """Raises RefusedError, 404."""
        model = self.models.get(model_id)
        if model is None:
            raise RefusedError(
                f"model {model_id!r} is not in training here: it was never created, its session has"
                " ended, or the server was restarted."
                " create_training_client_from_state continues from a checkpoint",
                404,
            )
        model.last_request = time.time()
        if (session := self.sessions.get(model.run.session_id)) is not None:
            session.last_seen = time.time()
        return model

    # ------------------------------------------------------------------ models

    def create_model(self, body: CreateModelBody) -> Promise:
        session = self.session(body.session_id)
        key = (session.session_id, body.model_seq_id)
        lora = body.lora_config or LoraBody()
        choice = LoraChoice(
            lora.rank, lora.seed, lora.train_unembed, lora.train_mlp, lora.train_attn
        )
        metadata = body.user_metadata or {}

        def create() -> tuple[TinkerRun, LearnedModel]:
            self._check_base(body.base_model)
            return self._begin(_model_id(key), session, choice, metadata), self.learner.create(
                choice
            )

        return self._create(
            key, f"creates a LoRA of rank {choice.rank}", create, {"type": "create_model"}
        )

    def load_model(self, body: LoadWeightsBody) -> Promise:
        """A new model from a checkpoint, or (older SDKs) a checkpoint into a model. Raises
        RequestError."""
        if body.model_id is not None:
            return self._load_into(body.model_id, body)
        if body.session_id is None or body.model_seq_id is None:
            raise RequestError(
                "load_weights needs session_id and model_seq_id (a new"
                " model), or model_id and seq_id"
            )
        session = self.session(body.session_id)
        key, metadata = (session.session_id, body.model_seq_id), body.user_metadata

        def load() -> tuple[TinkerRun, LearnedModel]:
            self._check_base(body.base_model or self.base_model)
            saved, choice, directory = self._saved(body.path, optimizer=body.optimizer)
            learned = self.learner.create(choice, directory, optimizer=body.optimizer)
            kept = saved.user_metadata if metadata is None else metadata
            return self._begin(_model_id(key), session, choice, kept), learned

        return self._create(
            key, f"loads {body.path}", load, {"type": "load_weights", "path": body.path}
        )

    def _create(
        self,
        key: tuple[str, int],
        what: str,
        create: Callable[[], tuple[TinkerRun, LearnedModel]],
        answer: dict[str, Any],
    ) -> Promise:
        if (earlier := self._creating.get(key)) is not None:
            return earlier
        promise = self.promises.new(_model_id(key))
        self._creating[key] = promise
        if len(self._creating) > MOST_CREATED:
            self._creating.pop(
                next((old for old, made in self._creating.items() if made.ready.is_set()), key)
            )
        if (full := self._make_room()) is not None:
            self.promises.resolve(promise, failure(full, category="user"))
            return promise

        def work() -> PromiseResult:
            run, learned = create()
            recorded = self.recorder.begin(run, learned)
            made = TrainedModel(run, learned, TinkerRunLog(recorded, run.run_id, learned.step))
            loop.call_soon_threadsafe(self._add, made)
            return json_result(answer | {"model_id": run.run_id})

        loop = asyncio.get_running_loop()
        self._run(QueuedRequest(promise, what, work))
        return promise

    def _add(self, model: TrainedModel) -> None:
        self.models[model.run.run_id] = model
        self.session(model.run.session_id).models.append(model.run.run_id)
        log.info("tinker model", id=model.run.run_id, lora=dict(model.run.lora))

    def _make_room(self) -> str | None:
        """Remove models of clients that are gone. Return why no model may be added; None: there
        is room."""
        creating = sum(not promise.ready.is_set() for promise in self._creating.values()) - 1
        if len(self.models) + creating < self.config.max_models:
            return None
        now = time.time()
        for model_id, model in sorted(self.models.items(), key=lambda item: item[1].last_request):
            session = self.sessions.get(model.run.session_id)
            if session is None or now - session.last_seen > GONE_AFTER_S:
                self.unload(model_id)
                return None
        return (
            f"{len(self.models)} models are in training (tinker.max_models ="
            f" {self.config.max_models}): close a"
            " ServiceClient that is done with its models, or raise the limit"
        )

    def _check_base(self, name: str) -> None:
        if name not in self.names:
            raise RequestError(
                f"this server has the base model {self.base_model!r}, not {name!r}",
                param="base_model",
            )

    def _begin(
        self, model_id: str, session: ClientSession, choice: LoraChoice, metadata: Mapping[str, Any]
    ) -> TinkerRun:
        run = TinkerRun(
            model_id, self.base_model, asdict(choice), time.time(), metadata, session.session_id
        )
        self.checkpoints.begin(run)
        return run

    def _saved(self, path: str, *, optimizer: bool) -> tuple[TinkerRun, LoraChoice, Path]:
        """The run of a checkpoint, its LoRA, and its directory. Raises RequestError."""
        checkpoint = self.checkpoints.require(path)
        kinds = (TRAINING,) if optimizer else (TRAINING, SAMPLER)
        if checkpoint.path.kind not in kinds:
            raise RequestError(
                f"{path} holds no optimizer state: load it without, or a path of kind {TRAINING}"
            )
        run = self.checkpoints.run(checkpoint.path.run)
        if run is None:
            raise RequestError(f"{path}: its run's description is gone")
        self._check_made_from(run, path)
        return run, LoraChoice(**run.lora), checkpoint.directory

    def _check_made_from(self, run: TinkerRun, path: str) -> None:
        if run.base_model not in self.names:
            raise RequestError(
                (
                    f"{path} was trained on the base model {run.base_model!r}, this server has"
                    f" {self.base_model!r}"
                ),
                param="path",
            )

    # ------------------------------------------------------------------ requests of a model

    def submit(
        self,
        model_id: str,
        seq_id: int | None,
        kind: str,
        work: Callable[[TrainedModel], PromiseResult],
        content: bytes,
        size: int = 0,
    ) -> Promise:
        """Queue a request under its number; None or 0 = next in the order of arrival.

        `content`: of the request, or a digest. A number comes again with the same, or it is
        refused. `size`: bytes that it holds until it has run. Raises RequestError; ServerBusyError:
        bodies take too much memory.
        """
        model = self.model(model_id)
        if not seq_id:
            seq_id = max([model.next_seq - 1, *model.waiting]) + 1
        if (earlier := model.accepted.get(seq_id)) is not None:
            if earlier[0] != kind:
                raise RequestError(
                    f"request {seq_id} of this model was {earlier[0]}, not {kind}", param="seq_id"
                )
            if earlier[1] != content:
                raise RequestError(
                    (
                        f"request {seq_id} of this model was sent before with another body: give"
                        " each its own seq_id"
                    ),
                    param="seq_id",
                )
            return earlier[2]
        if seq_id < model.next_seq or seq_id > model.next_seq + FARTHEST_AHEAD:
            raise RequestError(
                f"seq_id {seq_id}: the next request of this model is {model.next_seq}, and at most"
                f" {FARTHEST_AHEAD}"
                " may be ahead of it",
                param="seq_id",
            )
        # The request that all others wait for is never refused, or nothing would continue.
        blocked = seq_id != model.next_seq or self._running_bytes > 0
        if size and blocked and self._queued_bytes + size > MOST_QUEUED_BYTES:
            raise ServerBusyError(
                f"forward_backward requests of {self._queued_bytes} bytes"
                " wait for their turn; try again"
            )
        promise = self.promises.new(model_id)
        self._queued_bytes += size
        promise.reason = partial(self._reason, model, seq_id)
        model.accepted[seq_id] = (kind, content, promise)
        if len(model.accepted) > KEPT_REQUESTS:
            model.accepted.popitem(last=False)
        model.waiting[seq_id] = QueuedRequest(
            promise, f"{kind} {seq_id} of {model_id}", partial(work, model), size
        )
        while (ready := model.waiting.pop(model.next_seq, None)) is not None:
            model.next_seq += 1
            self._run(ready)
        return promise

    def refuse(self, model_id: str, seq_id: int, kind: str, why: str, content: bytes) -> Promise:
        """A numbered request that cannot be run takes its turn and fails: its client continues
        with the next number."""

        def work(model: TrainedModel) -> PromiseResult:
            return failure(why, category="user")

        return self.submit(model_id, seq_id, kind, work, content)

    def _reason(self, model: TrainedModel, seq_id: int) -> str:
        running = self.learner.running
        return model.missing(seq_id) or (f"runs: {running}" if running else "")

    def _run(self, waiting: QueuedRequest) -> None:
        loop = asyncio.get_running_loop()
        self._running_bytes += waiting.size
        done = self.learner.submit(waiting.what, waiting.work)

        def settled(result: PromiseResult) -> None:
            self._queued_bytes -= waiting.size
            self._running_bytes -= waiting.size
            self.promises.resolve(waiting.promise, result)

        def settle(future: "Future[PromiseResult]") -> None:
            loop.call_soon_threadsafe(settled, _outcome(future, waiting.what))

        done.add_done_callback(settle)

    def forward_backward(self, request: ForwardBackward) -> Promise:
        def work(model: TrainedModel) -> PromiseResult:
            began, learned = time.time(), model.learned
            batch = read_batch(request, self.learner.limits)
            output = (
                learned.forward(batch) if request.forward_only else learned.forward_backward(batch)
            )
            metrics = model.log.note(request, batch, output, learned.step, self.records, began)
            return protobuf_result(write_output(output.logprobs, metrics))

        kind = "forward" if request.forward_only else "forward_backward"
        return self.submit(
            request.model_id, request.seq_id, kind, work, request.content, request.size
        )

    def optim_step(self, body: OptimStepBody) -> Promise:
        """Raises RequestError: another optimizer than AdamW."""
        if body.optimizer_params is not None:
            kind = body.optimizer_params.get("type")
            raise RequestError(
                f"optimizer_params of type {kind!r} are not offered: send adam_params"
            )
        adam = body.adam_params or AdamBody()
        settings = AdamWSettings(
            adam.beta1, adam.beta2, adam.eps, adam.weight_decay, adam.grad_clip_norm
        )

        def work(model: TrainedModel) -> PromiseResult:
            began = time.time()
            try:
                applied = model.learned.optim_step(settings, adam.learning_rate)
            except RequestError:
                model.log.dropped()
                raise
            metrics = model.log.applied(applied, adam.learning_rate, began)
            return json_result({"type": "optim_step", "metrics": metrics})

        return self.submit(body.model_id, body.seq_id, "optim_step", work, _content(body))

    def save_weights(self, body: SaveWeightsBody) -> Promise:
        name = check_name(body.path or "")

        def work(model: TrainedModel) -> PromiseResult:
            path = TinkerPath(body.model_id, TRAINING, name)
            self._write(path, partial(model.learned.save, optimizer=True), body, model)
            return json_result({"type": "save_weights", "path": str(path)})

        return self.submit(body.model_id, body.seq_id, "save_weights", work, _content(body))

    def save_external(self, body: SaveExternalBody) -> Promise:
        """Raises RequestError: encryption."""
        if body.age_encryption_recipients:
            raise RequestError(
                "age_encryption_recipients is not offered: files stay on this machine, in the clear"
            )
        name = check_name(body.path or "")

        def work(model: TrainedModel) -> PromiseResult:
            path = TinkerPath(body.model_id, EXTERNAL, name)
            write = partial(
                save_peft, layers=model.learned.adapter(), dropout=0.0, base=self.base_model
            )
            self._write(path, write, body, model)
            return json_result({"type": "save_weights_external", "path": str(path)})

        return self.submit(
            body.model_id, body.seq_id, "save_weights_external", work, _content(body)
        )

    def save_for_sampler(self, body: SaveForSamplerBody) -> Promise:
        """Raises RequestError."""
        if body.path is not None:
            return self._save_named(body, check_name(body.path))
        if body.sampling_session_seq_id is None:
            raise RequestError(
                "save_weights_for_sampler needs a path, or a sampling_session_seq_id"
            )
        session = self.session(self.model(body.model_id).run.session_id)
        sampler_id = f"{session.session_id}:sample:{body.sampling_session_seq_id}"
        loop = asyncio.get_running_loop()

        def work(model: TrainedModel) -> PromiseResult:
            weights = model.weights
            model.live += 1
            inflight = body.kind == "inflight"
            adapter = f"tinker://{body.model_id}/{INFLIGHT if inflight else f'live/{model.live}'}"
            self.samplers.put(adapter, body.model_id, model.learned.adapter())
            sampler = Sampler(sampler_id, self.base_model, adapter=adapter, run=body.model_id)
            if inflight:
                model.inflight = weights
            sampler.weights = (lambda: model.inflight) if inflight else (lambda: weights)
            loop.call_soon_threadsafe(self.add_sampler, session, sampler)
            answer = {
                "type": "save_weights_for_sampler",
                "path": None,
                "sampling_session_id": sampler_id,
            }
            return json_result(answer)

        return self.submit(
            body.model_id, body.seq_id, "save_weights_for_sampler", work, _content(body)
        )

    def _save_named(self, body: SaveForSamplerBody, name: str) -> Promise:
        def work(model: TrainedModel) -> PromiseResult:
            path = TinkerPath(body.model_id, SAMPLER, name)
            self._write(path, partial(model.learned.save, optimizer=False), body, model)
            self.samplers.put(str(path), body.model_id, model.learned.adapter())
            return json_result({"type": "save_weights_for_sampler", "path": str(path)})

        return self.submit(
            body.model_id, body.seq_id, "save_weights_for_sampler", work, _content(body)
        )

    def _write(
        self,
        path: TinkerPath,
        write: Callable[[Path], None],
        body: SaveWeightsBody,
        model: TrainedModel,
    ) -> None:
        self.checkpoints.save(
            path,
            write,
            ttl_seconds=body.ttl_seconds,
            user_metadata=body.user_metadata,
            overwrite=body.overwrite,
            weights=model.weights,
        )

    def _load_into(self, model_id: str, body: LoadWeightsBody) -> Promise:
        def work(model: TrainedModel) -> PromiseResult:
            _, _, directory = self._saved(body.path, optimizer=body.optimizer)
            model.learned.load(directory, optimizer=body.optimizer)
            model.log.loaded(body.path)
            return json_result({"type": "load_weights", "path": body.path, "model_id": model_id})

        return self.submit(model_id, body.seq_id, "load_weights", work, _content(body))

    # ------------------------------------------------------------------ sampling sessions

    def add_sampler(self, session: ClientSession, sampler: Sampler) -> None:
        session.samplers.append(sampler.sampler_id)
        gone = self.sampling.add(sampler)
        owner = None if gone is None else self.sessions.get(gone.session_id)
        if gone is not None and owner is not None:
            owner.samplers.remove(gone.sampler_id)

    async def create_sampler(
        self, session: ClientSession, seq_id: int, base_model: str | None, model_path: str | None
    ) -> Sampler:
        """Raises RequestError: neither, another base, no such checkpoint."""
        sampler_id = f"{session.session_id}:sample:{seq_id}"
        if (existing := self.sampling.get(sampler_id)) is not None:
            if existing.adapter != model_path:
                raise RequestError(
                    f"sampling session {seq_id} was made with"
                    f" {existing.model_path or 'other weights'}: give each its own"
                    " sampling_session_seq_id",
                    param="sampling_session_seq_id",
                )
            return existing
        if model_path is None:
            if base_model is None:
                raise RequestError("a sampling session needs base_model or model_path")
            self._check_base(base_model)
            sampler = Sampler(sampler_id, self.base_model)
        else:
            sampler = await asyncio.to_thread(self._named_sampler, sampler_id, model_path)
        self.add_sampler(session, sampler)
        return sampler

    def _named_sampler(self, sampler_id: str, model_path: str) -> Sampler:
        checkpoint = self.checkpoints.require(model_path)
        if checkpoint.path.kind not in (SAMPLER, TRAINING):
            raise RequestError(
                f"{model_path} cannot be sampled from: expected a path of kind {SAMPLER}"
            )
        run = checkpoint.path.run
        if (described := self.checkpoints.run(run)) is not None:
            self._check_made_from(described, model_path)
        self.samplers.load(model_path, run, checkpoint.directory)
        sampler = Sampler(
            sampler_id, self.base_model, model_path, model_path, run, checkpoint.directory
        )
        sampler.weights = lambda: checkpoint.weights
        return sampler


def _content(body: TinkerBody) -> bytes:
    return blake2b(repr(body).encode(errors="backslashreplace"), digest_size=16).digest()


def _model_id(key: tuple[str, int]) -> str:
    """Return the model's id, which SDKs since 0.24.1 compute in the same way."""
    return f"{key[0]}:train:{key[1]}"


def _outcome(future: "Future[PromiseResult]", what: str) -> PromiseResult:
    error = future.exception()
    if error is None:
        return future.result()
    if isinstance(error, ParallmError):
        return failure_of(error)
    log.error("tinker request failed", what=what, exc_info=error)
    return failure(f"the server failed ({what}): {error!r}", category="server")
