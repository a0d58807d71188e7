"""Start the engine thread of a loaded model, for the daemon and for an `InferenceModule`."""

import random
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from mlx.utils import tree_flatten

from mlx_parallm.config.server import ServerConfig
from mlx_parallm.engine.companions.companion import (
    EngineCompanion,
    EngineCompanions,
    ModelToServe,
)
from mlx_parallm.engine.companions.makers import makers_of
from mlx_parallm.engine.engine import Engine
from mlx_parallm.engine.lanes import divided
from mlx_parallm.engine.parts import EngineOptions
from mlx_parallm.engine.prefix_disk.disk import PrefixDisk
from mlx_parallm.engine.prefix_disk.opening import open_prefix_disk
from mlx_parallm.engine.served_models import ServedModels
from mlx_parallm.engine.thread import EngineThread
from mlx_parallm.errors import ConfigError
from mlx_parallm.execution.thinking import ends_thinking
from mlx_parallm.models.adapters.adapter import LoraPair
from mlx_parallm.models.attention import route_attention
from mlx_parallm.models.loading import LoadedModel
from mlx_parallm.models.lora import fit_adapter, linear_shapes, prepare_for_serving
from mlx_parallm.models.ops import use_fast_rope, use_fast_swiglu, use_few_rows
from mlx_parallm.models.tokenizer import Tokenizer
from mlx_parallm.system.hardware import (
    async_scheduling,
    bound_buffer_cache,
    kv_cache_bytes,
    prefix_cache_bytes,
    prefix_disk_bytes,
    wire_memory,
)
from mlx_parallm.system.log import get_logger
from mlx_parallm.system.serve_priority import Turns
from mlx_parallm.weights import SharedWeights


@dataclass(frozen=True)
class StartedEngine:
    """`names`: under which it answers; `shapes`: `linear_shapes` of the model."""

    thread: EngineThread
    names: ServedModels
    shapes: Mapping[str, tuple[int, ...]]


def start_engine(
    server: ServerConfig,
    loaded: LoadedModel,
    weights: SharedWeights,
    tokenizer: Callable[[], Tokenizer],
    *,
    base: str,
    deterministic: bool,
    chats_first: bool,
    adapters: Mapping[str, Mapping[str, LoraPair]],
    main_adapter: str | None,
    trains_base: bool = False,
    turns: Turns | None = None,
    processes: int = 1,
    recorded: Collection[str] = (),
) -> StartedEngine:
    """Wraps the tree of `loaded` for serving, and starts the thread.

    Args:
        weights: made from the tree before this call wraps it.
        tokenizer: makes one for the engine's thread.
        base: its id in /v1/models.
        deterministic: as rl_training.deterministic.
        chats_first: rl_training.serve_priority = "chat".
        adapters: name → layers, served beside the base.
        main_adapter: the adapter that the base's id and `default` mean; None = the base itself.
        processes: share this machine's memory, each with such an engine.
        recorded: names of what the trainer repeats of that which companions record
            (`models.experts.replay`).

    Raises AdapterError: one does not fit; ConfigError; ModelError: the engine cannot decode the
    architecture.
    """
    options = engine_options(server, loaded, deterministic=deterministic, processes=processes)
    makers = makers_of(ModelToServe(loaded, server, recorded))
    bound_buffer_cache(server.buffer_cache, processes=processes)
    weight_bytes = sum(array.nbytes for _, array in tree_flatten(loaded.model.parameters()))
    if advice := wire_memory(weight_bytes, server.wired_memory):
        get_logger(__name__).warning("memory_is_short", advice=advice)
    shapes = linear_shapes(loaded.model)
    for name, layers in adapters.items():
        weights.add_adapter(name, fit_adapter(shapes, layers, name))
    names = ServedModels(
        base,
        adapter_versions=lambda: {
            name: adapter.version for name, adapter in weights.adapters().items()
        },
        version=lambda: weights.version,
        policy_adapter=main_adapter,
        trains_base=trains_base,
        aliases=server.served_model_names,
        policy_versions=weights.history.versions,
        loader=weights.loader,
        shelved=lambda name: weights.shelf is not None and weights.shelf.holds(name),
        shelved_names=lambda: () if weights.shelf is None else weights.shelf.names(),
    )
    use_few_rows(loaded.model)
    with loaded.text_alone():
        use_fast_swiglu(loaded.model)
        use_fast_rope(loaded.model)
        route_attention(loaded.model)
    lora = prepare_for_serving(loaded.model)
    companions = [maker(lora) for maker in makers]
    if options.prompt_lookup and (why := no_drafts(companions, deterministic=deterministic)):
        get_logger(__name__).warning("server.prompt_lookup is off", reason=why)
        options = replace(options, prompt_lookup=0)
    engine_tokenizer = tokenizer()
    if server.reasoning_budgets and not ends_thinking(engine_tokenizer):
        reason = "this model's reasoning has no marker at its end, so none can be forced"
        get_logger(__name__).warning("server.reasoning_budgets is off", reason=reason)
    others, chats = divided(options) if chats_first else (options, None)
    off = deterministic or trains_base or EngineCompanions(companions).records_prompts
    disk = _prefix_disk(server, loaded, options.prefix_cache_bytes, off=off)
    build = partial(Engine, loaded.model, engine_tokenizer, weights, lora, prefix_disk=disk)
    thread = EngineThread(
        lambda: build(others, companions),
        names,
        turns,
        chats=None
        if chats is None
        else lambda engine: build(chats, companions, grammars=engine.grammars),
    )
    thread.start()
    return StartedEngine(thread, names, shapes)


def _prefix_disk(
    server: ServerConfig, loaded: LoadedModel, prefix_cache_bytes: int, *, off: bool
) -> PrefixDisk | None:
    """Raises ConfigError: it is asked for without a prefix cache, or cannot be made."""
    wanted = server.prefix_disk_bytes
    if off and wanted:
        get_logger(__name__).warning(
            "server.prefix_disk_bytes is off",
            reason="the base is trained, prompts are recorded, or the run is deterministic",
        )
    most = prefix_disk_bytes(wanted, server.prefix_disk_directory(), off=off)
    if most and not prefix_cache_bytes:
        if wanted:
            raise ConfigError(
                "server.prefix_disk_bytes needs server.prefix_cache_bytes, which holds what is read"
            )
        most = 0
    return open_prefix_disk(server, loaded, most) if most else None


def no_drafts(companions: Iterable[EngineCompanion], *, deterministic: bool) -> str:
    """Return why texts are not drafted; "" if they are."""
    if deterministic:
        return "rl_training.deterministic: which steps have a draft depends on who else is there"
    return next((each.no_drafts for each in companions if each.no_drafts), "")


def engine_options(
    server: ServerConfig, loaded: LoadedModel, *, deterministic: bool, processes: int = 1
) -> EngineOptions:
    """Raises ConfigError: [server] wants a longer context than the model has."""
    context = loaded.max_model_len
    if server.max_model_len is not None and server.max_model_len > context:
        raise ConfigError(
            f"server.max_model_len = {server.max_model_len}, but the"
            f" model's context is {context} tokens"
        )
    return EngineOptions(
        max_model_len=server.max_model_len or context,
        vocab_size=loaded.vocab_size,
        max_rows=server.batch_size,
        prefill_chunk=server.prefill_chunk,
        max_prefill_ms=None if deterministic else server.max_prefill_ms,
        kv_cache_bytes=kv_cache_bytes(
            server.kv_cache_bytes, deterministic=deterministic, processes=processes
        ),
        by_tokens=server.kv_layout == "auto",
        kv_bits=server.kv_bits,
        prompt_lookup=server.prompt_lookup,
        prefix_cache_bytes=prefix_cache_bytes(
            server.prefix_cache_bytes, deterministic=deterministic, processes=processes
        ),
        default_max_tokens=server.default_max_tokens,
        seed=random.SystemRandom().getrandbits(63),
        processed_alternatives=server.logprobs_mode == "processed",
        close_objects=not server.open_objects,
        async_scheduling=async_scheduling(server.async_scheduling, deterministic=deterministic),
        architecture=str(loaded.config.get("model_type", "this model")),
    )
