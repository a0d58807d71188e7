"""Which experts a token goes to: recorded in one forward, repeated in another ("rollout routing
replay", R3, arXiv:2510.11370).

A router takes the k experts with the largest scores. Two forwards whose numbers differ in the last
digits (other kernels, bfloat16, a quantised base, newer weights) take other experts for some
tokens, and the log-probability of such a token jumps. So the engine records the experts of each
token that it samples, and the trainer's forward takes the same ones. Their weights come from the
trainer's own router, and the gradient flows through it as usual.

mlx-lm's blocks of experts choose by `mx.argpartition` over the last axis, and give what they chose
to a `SwitchGLU` or `SwitchMLP`. `prepare_routing` numbers these blocks, and lets the name `mx` of
their modules lead here: inside of a block of a prepared model, in a thread that records or repeats,
the choice is noted or replaced; everything else goes to MLX as before. A block that chooses in
another way (a compiled function, a choice of groups first) is found by `why_not_routed`, which
forces experts on it and looks.
"""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_parallm.models.experts.targets import are_experts
from mlx_parallm.models.mlx_lm_api import SwitchGLU, SwitchMLP
from mlx_parallm.models.seen_tokens import seen_tokens

UNFORCED = -1
"""In the place of an expert's id: the router chooses."""

_OTHERWISE = "its experts are chosen in a compiled function, or in another way"
_thread = threading.local()
_NAME = "mx"
_kinds: dict[type, type] = {}


class ForwardRouting:
    """The choice of experts in the forwards of one thread while a block runs.

    Args:
        forced: [tokens, layers, k] int32, the experts to take; `UNFORCED`: the router's own. None:
            all are the router's own.
        of_prompts: [tokens] bool, the forced tokens that `counts` has apart. None: no such tokens.
        counted: [tokens] int32, 1 = the token's experts count in the load of `counts`. None: no
            load is counted, and without `forced` the choices are noted.
    """

    def __init__(
        self,
        forced: mx.array | None = None,
        of_prompts: mx.array | None = None,
        counted: mx.array | None = None,
    ) -> None:
        self.forced, self.of_prompts, self.counted = forced, of_prompts, counted
        self.chosen: dict[int, mx.array] = {}
        """Layer → [tokens, k], of the newest forward; filled only if nothing is forced or
        counted."""
        self.counts: list[mx.array] | None = None
        """[5 + experts] int32 of each block: its layer, tokens that are forced, those of them for
        which the router would have chosen another set, the same two of prompts' tokens, and the
        tokens of each expert (no load is counted: 0). None: nothing is counted."""
        self._layer: int | None = None

    def choose(self, kth: int, partition: mx.array) -> mx.array:
        """Return k expert ids [..., k] in the place of `argpartition(scores, kth)`.

        The caller takes the last k of it (kth = -k) or the first k (kth = k - 1), and gets
        these.
        """
        chosen = partition[..., kth:] if kth < 0 else partition[..., : kth + 1]
        if self._layer is None:
            return partition
        if self.forced is None and self.counted is None:
            self.chosen[self._layer] = chosen.reshape(-1, chosen.shape[-1])
            return partition
        seen = seen_tokens()
        tokens = seen if isinstance(seen, slice) else mx.array(seen)
        taken, others = chosen, mx.zeros((4,), mx.int32)
        if self.forced is not None:
            of_prompts = None if self.of_prompts is None else self.of_prompts[tokens]
            forced = self.forced[tokens][:, self._layer]
            taken, others = self._forced_of(forced, of_prompts, chosen)
        if self.counts is not None:
            load = mx.zeros((partition.shape[-1],), mx.int32)
            if self.counted is not None:
                ids = taken.reshape(-1, taken.shape[-1])
                weights = mx.broadcast_to(self.counted[tokens][:, None], ids.shape)
                load = load.at[ids.flatten()].add(weights.flatten())
            counts = mx.concatenate([mx.array([self._layer], mx.int32), others, load])
            self.counts.append(mx.stop_gradient(counts))
        return partition if self.forced is None else taken

    def _forced_of(
        self, forced: mx.array, of_prompts: mx.array | None, chosen: mx.array
    ) -> tuple[mx.array, mx.array]:
        """Return the experts to use, and four counts, int32 [4]: forced tokens, those whose
        experts differ from the router's, and the same two for tokens of prompts."""
        if forced.size != chosen.size:
            raise ValueError(
                f"{forced.shape[0]} tokens have {forced.shape[1]} recorded experts each; layer"
                f" {self._layer} of the model routes {chosen.size // chosen.shape[-1]} tokens to"
                f" {chosen.shape[-1]} experts"
            )
        forced = forced.reshape(chosen.shape).astype(chosen.dtype)
        is_forced = forced != mx.array(UNFORCED).astype(chosen.dtype)
        whole = is_forced.all(axis=-1)
        same = (mx.sort(forced, axis=-1) == mx.sort(chosen, axis=-1)).all(axis=-1)
        counts = [whole, whole & ~same]
        if of_prompts is None:
            apart = [mx.zeros_like(whole)] * 2
        else:
            prompts = of_prompts.reshape(whole.shape)
            apart = [each & prompts for each in counts]
            counts = [each & ~prompts for each in counts]
        others = mx.stack([each.sum() for each in (*counts, *apart)]).astype(mx.int32)
        return mx.where(is_forced, forced, chosen), others

    def by_token(self) -> mx.array:
        """Return the chosen experts, [tokens, layers, k]."""
        return mx.stack([self.chosen[number] for number in sorted(self.chosen)], axis=1)

    @contextmanager
    def layer(self, number: int) -> Iterator[None]:
        """Run a numbered block of experts."""
        before, self._layer = self._layer, number
        try:
            yield
        finally:
            self._layer = before


class _RoutedBlock:
    """A block of experts of a prepared model. `_routing_number`: its place among them."""

    _routing_number: int

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        routing = current()
        if routing is None:
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        with routing.layer(self._routing_number):
            return super().__call__(*args, **kwargs)  # type: ignore[misc]


def _argpartition(a: mx.array, kth: int, axis: int | None = -1, **others: Any) -> mx.array:
    """Call `mlx.core.argpartition`, and let this thread's routing note or replace its choice."""
    partition = mx.argpartition(a, kth, axis, **others)
    routing = current()
    if routing is None or axis not in (-1, a.ndim - 1):
        return partition
    return routing.choose(kth, partition)


_names = ModuleType("mlx.core")
"""mlx.core, with a choice of experts that can be noted and replaced."""
vars(_names).update(vars(mx), argpartition=_argpartition)


def current() -> ForwardRouting | None:
    """Return this thread's routing."""
    return getattr(_thread, "routing", None)


@contextmanager
def routed(routing: ForwardRouting | None) -> Iterator[None]:
    """Let this thread's forwards of prepared models go by `routing`; None: by their routers."""
    before = current()
    _thread.routing = routing
    try:
        yield
    finally:
        _thread.routing = before


@contextmanager
def counted(routing: ForwardRouting | None) -> Iterator[list[mx.array]]:
    """Count the experts that tokens go to; see `ForwardRouting.counts`. The counts may be evaluated
    with the blocks' outputs."""
    counts: list[mx.array] = []
    if routing is not None:
        routing.counts = counts
    try:
        yield counts
    finally:
        if routing is not None:
            routing.counts = None


def blocks_of_experts(model: nn.Module) -> list[nn.Module]:
    """Return the modules with a switch of experts as a child, in the model's order."""
    return [
        module
        for _, module in sorted(model.named_modules(), key=lambda entry: _order(entry[0]))
        if any(isinstance(child, SwitchGLU | SwitchMLP) for child in module.children().values())
    ]


def prepare_routing(model: nn.Module) -> int:
    """Number the model's blocks of experts, and let their choice come here; return how many there
    are. A second call changes nothing."""
    blocks = blocks_of_experts(model)
    for number, block in enumerate(blocks):
        kind = type(block)
        if not isinstance(block, _RoutedBlock):
            for base in kind.__mro__:
                names = vars(sys.modules[base.__module__])
                if names.get(_NAME) is mx:
                    names[_NAME] = _names
            block.__class__ = _kinds.setdefault(
                kind, type(kind.__name__, (_RoutedBlock, kind), {"__module__": kind.__module__})
            )
        cast(_RoutedBlock, block)._routing_number = number
    return len(blocks)


def routing_shape(model: nn.Module) -> tuple[int, int, int] | None:
    """Return (layers, experts a token, experts) of a prepared model, which computes two tokens for
    it. None: it has no experts, or `why_not_routed` says why."""
    try:
        chosen = _choices(model)
    except _FAULTS:
        return None
    if not chosen:
        return None
    [(_, k)] = {array.shape for array in chosen}
    projections = cast("dict[str, Any]", _switch(blocks_of_experts(model)[0]).children()).values()
    inside = (projection.get("linear", projection) for projection in projections)
    number = next(layer.num_experts for layer in inside if are_experts(layer))
    return len(chosen), k, int(number)


def why_not_routed(model: nn.Module) -> str:
    """Return why the experts of a prepared model cannot be recorded and repeated; "" when they can.
    It computes two tokens three times."""
    count = len(blocks_of_experts(model))
    if not count:
        return "the model has no experts"
    try:
        chosen = _choices(model)
        if len(chosen) != count or len({array.shape for array in chosen}) != 1:
            return _OTHERWISE
        experts = routing_shape(model)
        assert experts is not None
        _, k, number = experts
        if number == k:
            return "every token goes to all of its experts"
        ids = np.stack([np.array(array) for array in chosen], axis=1)  # [2, layers, k]
        _, probe = _outputs(model, ForwardRouting(mx.array(ids.astype(np.int32))))
        _, free = _outputs(model, None)
        # the experts that the router left out: a set that it would not choose
        others = np.array(
            [
                [
                    [e for e in range(number) if e not in row][: max(1, min(k, number - k))]
                    for row in token
                ]
                for token in ids
            ],
            np.int32,
        )
        wrong = ids.astype(np.int32).copy()
        wrong[:, :, : others.shape[-1]] = others
        seen, moved = _outputs(model, ForwardRouting(mx.array(wrong)), watch=True)
    except _FAULTS as error:
        of_a_trace = "compile" in str(error)
        return _OTHERWISE if of_a_trace else f"a forward of two tokens fails: {error}"
    if not np.array_equal(np.sort(np.stack(seen, axis=1), axis=-1), np.sort(wrong, axis=-1)):
        return "its blocks do not take the experts that they are told to take"
    if not mx.allclose(probe, free, rtol=1e-5, atol=1e-5).item():
        return "its own choice, repeated, gives other logits"
    return "" if not mx.array_equal(moved, free).item() else "other experts give the same logits"


_FAULTS = (ValueError, TypeError, AttributeError, IndexError, RuntimeError, StopIteration)


def _choices(model: nn.Module) -> list[mx.array]:
    """Return each block's choice for two tokens, [2, k] each."""
    routing = ForwardRouting()
    _outputs(model, routing)
    chosen = [routing.chosen[number] for number in sorted(routing.chosen)]
    mx.eval(chosen)
    return chosen


def _outputs(
    model: nn.Module, routing: ForwardRouting | None, *, watch: bool = False
) -> tuple[list[np.ndarray], mx.array]:
    """Return the switches' inputs for two tokens (with `watch`), and the logits."""
    seen: list[mx.array] = []

    class Watched:
        def __call__(self, x: mx.array, indices: mx.array) -> Any:
            seen.append(indices.reshape(2, -1))
            return super().__call__(x, indices)  # type: ignore[misc]

    switches = [_switch(block) for block in blocks_of_experts(model)] if watch else []
    kinds = [type(switch) for switch in switches]
    try:
        for switch, kind in zip(switches, kinds, strict=True):
            switch.__class__ = type(kind.__name__, (Watched, kind), {})
        with routed(routing):
            logits = model(mx.array([[0, 1]], dtype=mx.int32)).astype(mx.float32)
        mx.eval(logits, seen)
    finally:
        for switch, kind in zip(switches, kinds, strict=True):
            switch.__class__ = kind
    return [np.array(array).astype(np.int32) for array in seen], logits


def _switch(block: nn.Module) -> nn.Module:
    return next(
        child for child in block.children().values() if isinstance(child, SwitchGLU | SwitchMLP)
    )


def _order(path: str) -> list[tuple[int, str]]:
    """Sort "layers.10" behind "layers.9"."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in path.split(".")]


def expert_load(counts: np.ndarray) -> dict[str, float]:
    """Return numbers about the tokens of each expert, `counts` [layers, experts]:

    `expert_tokens`: tokens of the average expert.
    `expert_load_max`: tokens of a layer's busiest expert ÷ those of the average one, the mean over
    layers; 1 = all are used alike, experts ÷ (experts a token) = always the same ones.
    `expert_load_entropy`: entropy of a layer's load ÷ its highest, log(experts), the mean over
    layers; 1 = all are used alike.
    `experts_unused`: share of the experts to which no token went.

    Empty if nothing was counted.
    """
    if not counts.any():
        return {}
    share = counts / counts.sum(axis=1, keepdims=True)
    logs = np.log(share, out=np.zeros_like(share), where=share > 0)
    return {
        "expert_tokens": float(counts.mean()),
        "expert_load_max": float((counts.max(axis=1) / counts.mean(axis=1)).mean()),
        "expert_load_entropy": float((-share * logs).sum(axis=1).mean() / np.log(counts.shape[1])),
        "experts_unused": float((counts == 0).mean()),
    }
