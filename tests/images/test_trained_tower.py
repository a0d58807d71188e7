"""What makes features of images is trained, with a tower of this file: its gradients are those of
one graph over everything, the engine sees with what was published, and nothing else has moved."""

import copy
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from structlog.testing import capture_logs

from mlx_parallm.config.training import RLTrainingConfig
from mlx_parallm.engine.companions.companion import Carried
from mlx_parallm.engine.companions.images import ImageFeatures, image_ids
from mlx_parallm.engine.decoding.forward import GivenText
from mlx_parallm.engine.engine import Engine
from mlx_parallm.errors import AdapterError, CheckpointError
from mlx_parallm.models.adapters.adapter import LoraPair
from mlx_parallm.models.images.embedding import admit_images
from mlx_parallm.models.images.encoder import ImageParts, put_into_tree
from mlx_parallm.models.images.positions import chunked_axes, image_positions
from mlx_parallm.models.loading import LoadedModel
from mlx_parallm.models.logprobs import token_logprobs
from mlx_parallm.models.lora import prepare_for_serving
from mlx_parallm.models.mlx_lm_api import save_model
from mlx_parallm.rl_training.factory import build_trainer
from mlx_parallm.rl_training.options import make_algorithm
from mlx_parallm.rl_training.publish.weight_updater import publish
from mlx_parallm.rl_training.step.batch import TrainSequence
from mlx_parallm.rl_training.step.collate import MicroBatch
from mlx_parallm.rl_training.step.trainer import Trainer
from mlx_parallm.system.log import configure_logging
from mlx_parallm.types import PromptImage, Request, Rollout, SamplingParams
from mlx_parallm.weights import SharedWeights
from tests.engine.helpers import QWEN3, VOCAB, ByteTokenizer, engine_options, qwen3_model, run

IMAGE, WIDTH, PIXELS = 298, 64, 6
LORA = {"rank": 2, "target_modules": ("q_proj", "up_proj")}


class Eye(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(PIXELS, 16)
        self.norm = nn.LayerNorm(16)
        self.second = nn.Linear(16, width)

    def before(self, pixels: mx.array) -> mx.array:
        return self.norm(mx.tanh(self.first(pixels)))


class SeeingEncoder:
    """A tower of two layers under `eye`."""

    token_id = IMAGE
    cache_bytes = 1 << 20
    bidirectional = False
    tree: Any

    def __init__(self, trained: tuple[str, ...], *, levels: int = 0, turns: bool = False) -> None:
        mx.random.seed(5)
        self.levels, self.trained = levels, trained
        self.rope_axes = chunked_axes((2, 3, 3)) if turns else None
        eye = Eye((1 + levels) * WIDTH)
        eye.second.weight = 4 * eye.second.weight
        eye.freeze()
        mx.eval(eye.parameters())
        self.eye, self.tree = eye, None
        self.passes = [0]  # of the tower's first layers

    @property
    def modules(self) -> Mapping[str, nn.Module]:
        return {"eye": self.eye if self.tree is None else self.tree.eye}

    def over(self, tree: nn.Module) -> Self:
        other = copy.copy(self)
        other.tree = tree
        return other

    @property
    def frozen_tower(self) -> bool:
        return self.trained == ("eye.second",)

    def tower_output(self, image: PromptImage) -> mx.array:
        self.passes[0] += 1
        return self.tree.eye.before(mx.array(image.arrays["pixels"]))

    def encode(self, image: PromptImage, output: mx.array | None = None) -> mx.array:
        features: mx.array = self.tree.eye.second(
            self.tower_output(image) if output is None else output
        )
        return features


class Reader:
    """Images by name: "sha256:" and a name of PICTURES."""

    placeholder, token_id = "", IMAGE

    def stored(self, name: str) -> PromptImage:
        return PICTURES[name.removeprefix("sha256:")]


def picture(name: str, grid: tuple[int, int, int]) -> PromptImage:
    digest = hashlib.sha256(name.encode()).hexdigest()
    tokens = int(np.prod(grid))
    pixels = np.random.default_rng(int(digest[:8], 16)).normal(size=(tokens, PIXELS))
    return PromptImage(digest, "", tokens, grid, {"pixels": pixels.astype(np.float32)})


PICTURES = {"cat": picture("cat", (1, 2, 2)), "dog": picture("dog", (1, 2, 3))}
CAT, DOG = (("sha256:cat", PICTURES["cat"]), ("sha256:dog", PICTURES["dog"]))


def built(encoder: SeeingEncoder, **settings: Any) -> tuple[LoadedModel, Trainer]:
    """A model that sees, and its trainer by REINFORCE's loss."""
    model = qwen3_model()
    over = put_into_tree(model, encoder)
    config = QWEN3 | {"vocab_size": VOCAB, "tie_word_embeddings": False}
    loaded = LoadedModel(model, config, Path(), 512, image_parts=ImageParts(over, Reader()))  # type: ignore[arg-type]
    values = {"algorithm": "sft", "lora": LORA, "learning_rate": 0.05}
    training = RLTrainingConfig.model_validate(values | {"warmup_steps": 0} | settings)
    return loaded, build_trainer(loaded, training, make_algorithm(training))


def sequence(*parts: Any, answer: tuple[int, ...]) -> TrainSequence:
    tokens, images = [], []
    for part in parts:
        if isinstance(part, tuple):
            images.append(part[0])
            tokens += [IMAGE] * part[1].tokens
        else:
            tokens.append(part)
    mask = (0,) * len(tokens) + (1,) * len(answer)
    versions = (-1,) * len(mask)
    rollout = Rollout((*tokens, *answer), mask, None, versions, 1.0, {}, images=tuple(images))
    return TrainSequence(rollout, (1.0,) * len(mask), fresh=False)


ROWS = (
    sequence(7, CAT, 8, 9, answer=(20, 21, 22)),
    sequence(3, 4, DOG, CAT, 5, answer=(30, 31)),
    sequence(1, 2, answer=(40, 41, 42, 43)),
    sequence(DOG, 8, answer=(50,)),
)
SAMPLED = sum(sum(row.rollout.mask) for row in ROWS)


class Likelihood:
    """The mean negative log-likelihood of the sampled tokens, as a loss of `accumulate`."""

    metric_names = ("none",)
    fuse = False

    def measure(self, micro_batch: MicroBatch) -> None:
        return None

    def objective(self, micro_batch: MicroBatch) -> Any:
        def loss(logprobs: mx.array, entropy: mx.array) -> Any:
            nothing = mx.zeros((1,)), mx.zeros((8,))
            return -logprobs.sum() / SAMPLED, (*nothing, logprobs + 0, entropy + 0)

        return loss


def gradients_of(trainer: Trainer, tokens: int = 1 << 14) -> dict[str, mx.array]:
    """Those of the trainer: micro-batches, blocks, the tower."""
    mini_batch = trainer.collate(ROWS, range(len(ROWS)), tokens)
    trainer.accumulate(mini_batch, Likelihood())  # type: ignore[arg-type]
    assert trainer.gradients is not None
    return dict(zip(trainer.policy.slots.names, trainer.gradients, strict=True))


def whole_graph(trainer: Trainer, encoder: SeeingEncoder) -> Callable[[list[mx.array]], mx.array]:
    """The same loss in one graph, one row after the other, by embeddings put together here."""
    model, slots = trainer.policy.model, trainer.policy.slots
    over, table = encoder.over(model), admit_images(model, encoder.rope_axes, encoder.levels)

    def loss(arrays: list[mx.array]) -> mx.array:
        with slots.bound(arrays):
            total = mx.array(0.0)
            for row in ROWS:  # of which none has padding
                rollout = row.rollout
                names = [name.removeprefix("sha256:") for name in rollout.images]
                images = [PICTURES[name] for name in names]
                features = iter([f for image in images for f in over.encode(image)])
                places = [p for p, token in enumerate(rollout.tokens) if token == IMAGE]
                shown = dict(zip(places, features, strict=True))
                starts = [sum(image.tokens for image in images[:n]) for n in range(len(images))]
                grids = [(places[n], i.grid) for n, i in zip(starts, images, strict=True)]
                turned = image_positions(len(rollout.tokens), grids)[0]
                with table.at(mx.array(turned)[:, None]):
                    total = total - _logprobs(model, rollout, shown, encoder.levels)
            return total / SAMPLED

    return loss


def _logprobs(model: Any, rollout: Rollout, shown: dict[int, mx.array], levels: int) -> mx.array:
    embedded = model.model.embed_tokens(mx.array(rollout.tokens))
    rows = [shown[p][:WIDTH] if p in shown else row for p, row in enumerate(embedded)]
    hidden = mx.stack(rows)[None]
    for index, block in enumerate(model.model.layers):
        hidden = block(hidden, "causal", None)
        if index < levels:
            columns = slice((1 + index) * WIDTH, (2 + index) * WIDTH)
            none = mx.zeros(WIDTH)
            added = [shown[p][columns] if p in shown else none for p in range(len(rows))]
            hidden = hidden + mx.stack(added)[None]
    logits = model.lm_head(model.model.norm(hidden))[0]
    places = [p for p, sampled in enumerate(rollout.mask) if sampled]
    targets = mx.array([rollout.tokens[p] for p in places])
    return token_logprobs(logits[mx.array(places) - 1], targets).sum()


@pytest.mark.parametrize("levels", [0, 1])
@pytest.mark.parametrize("blocks", [0, 1])
@pytest.mark.parametrize("full", [False, True])
def test_gradients_are_those_of_one_graph(levels: int, blocks: int, full: bool) -> None:
    encoder = SeeingEncoder(("eye",), levels=levels, turns=levels > 0)
    lora = {"enabled": False} if full else LORA
    _, trainer = built(encoder, lora=lora, blocks_per_eval=blocks)
    assert not trainer.model.fallback
    mx.random.seed(2)
    slots = trainer.policy.slots
    if not full:  # B = 0 hides half of the gradients
        slots.write([a + 0.1 * mx.random.normal(a.shape) for a in slots.read()])
    loss = whole_graph(trainer, encoder)
    expected = dict(zip(slots.names, mx.grad(loss)(slots.read()), strict=True))
    assert any(name.startswith("eye.") for name in expected)
    for tokens in (1 << 14, 16):  # all rows together; some micro-batches
        trainer.drop()
        for name, gradient in gradients_of(trainer, tokens).items():
            off = mx.linalg.norm(gradient - expected[name]).item()
            assert off <= 1e-4 * mx.linalg.norm(expected[name]).item() + 1e-7, name


@pytest.mark.parametrize("trained", [(), ("eye",)])
def test_a_forward_has_the_features_of_its_own_images_alone(
    trained: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, trainer = built(SeeingEncoder(trained))
    assert trainer.companions["images"] is not None
    table, rows = admit_images(trainer.policy.model), []
    learn = trainer.model.loss_and_gradients

    def noted(*args: Any, **kwargs: Any) -> Any:
        results = learn(*args, **kwargs)
        rows.append(0 if table.features is None else len(table.features))
        if trained:
            assert trainer.model.feature_slopes is not None
            assert trainer.model.feature_slopes.shape == (rows[-1], WIDTH)
        return results

    monkeypatch.setattr(trainer.model, "loss_and_gradients", noted)
    gradients_of(trainer, 16)
    cat, dog = PICTURES["cat"].tokens, PICTURES["dog"].tokens
    # a micro-batch without a gradient for the tower, where it had one, is computed again
    assert sorted(set(rows)) == [cat, dog, cat + dog], "three micro-batches"
    assert (table.features is None) is not trained and table.rows is None


def test_a_gradient_is_a_finite_difference() -> None:
    encoder = SeeingEncoder(("eye",))
    _, trainer = built(encoder, lora={"enabled": False})
    slots, loss = trainer.policy.slots, whole_graph(trainer, encoder)
    place = slots.names.index("eye.first.weight")
    gradient = gradients_of(trainer)["eye.first.weight"]
    step = 1e-2 * gradient / mx.linalg.norm(gradient)
    values = []
    for sign in (1, -1):
        moved = slots.read()
        moved[place] = moved[place] + sign * step
        values.append(loss(moved).item())
    slope = (values[0] - values[1]) / (2 * 1e-2)
    assert slope == pytest.approx(mx.linalg.norm(gradient).item(), rel=2e-3)


@pytest.mark.parametrize("full", [False, True])
def test_what_is_not_named_stays_as_it_is(full: bool) -> None:
    lora = {"enabled": False} if full else LORA
    _, frozen = built(SeeingEncoder(()), lora=lora)
    assert not [name for name in frozen.policy.slots.names if name.startswith("eye")]
    assert frozen.companions["images"].gradient is None
    _, connector = built(SeeingEncoder(("eye.second",)), lora=lora)
    names = [name for name in connector.policy.slots.names if name.startswith("eye")]
    assert names and all(name.startswith("eye.second.") for name in names)
    if full:
        model = connector.policy.model
        saved = {name for name, _ in tree_flatten(model.parameters())}
        assert {"eye.first.weight", "eye.norm.weight"} <= saved, "a checkpoint has all of it"


@pytest.mark.parametrize(("part", "turns"), [("eye", False), ("eye", True), ("eye.second", False)])
@pytest.mark.parametrize("full", [False, True])
def test_engine_and_trainer_agree_after_each_publish(full: bool, part: str, turns: bool) -> None:
    encoder = SeeingEncoder((part,), turns=turns)
    loaded, trainer = built(encoder, lora={"enabled": False} if full else LORA)
    policy, model = trainer.policy, loaded.model
    weights = SharedWeights(model, policy=None if full else "policy", keep_versions=2)
    lora = prepare_for_serving(model)
    table = admit_images(model, encoder.rope_axes)
    features = ImageFeatures(encoder.over(model), table, lora.activate)
    options = engine_options(prefill_chunk=16)
    engine = Engine(model, ByteTokenizer(), weights, lora, options, [features])
    tokens = ROWS[1].rollout.tokens[:-2]
    seen = {}
    for version in (1, 2, 3):
        publish(weights, trainer, version, None)
        wanted = [("policy", policy)] if full else [("policy", policy), (None, None)]
        for name, _ in wanted:
            adapter = None if full else name
            request = Request(
                f"{name}{version}",
                tokens,
                SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True),
                adapter=adapter,
                images=(PICTURES["dog"], PICTURES["cat"]),
            )
            [completion] = run(engine, [request])[request.request_id].completions
            mask = (0,) * len(tokens) + (1,) * 4
            rollout = replace(
                ROWS[1].rollout,
                tokens=(*tokens, *completion.token_ids),
                mask=mask,
                policy_versions=(version,) * len(mask),
            )
            if name is None:
                with policy.reference():
                    [expected] = trainer.logprobs([rollout])
            else:
                [expected] = trainer.logprobs([rollout])
            assert np.abs(expected - completion.logprobs).max() <= 1e-4, (name, version)
            seen[name, version] = completion.logprobs
        gradients_of(trainer)
        trainer.apply(0.05)
    assert seen["policy", 1] != seen["policy", 2] != seen["policy", 3]
    if not full:
        assert seen[None, 1] == seen[None, 3], "the base's own features are kept"
        assert features.encoded == 2 + 3 * 2
    else:
        assert features.encoded == 3 * 2
    if part == "eye.second":
        assert encoder.passes == [2 * 2], "engine and trainer, two images"


def test_a_frozen_tower_runs_once_an_image_while_its_connector_learns() -> None:
    encoders = [SeeingEncoder(("eye.second",)) for _ in range(2)]
    encoders[1].cache_bytes = 1  # keeps nothing
    learned = []
    for encoder in encoders:
        _, trainer = built(encoder, lora={"enabled": False})
        steps = [gradients_of(trainer, tokens) for tokens in (1 << 14, 16)]
        for _ in range(2):
            trainer.apply(0.05)
            steps.append(gradients_of(trainer, 16))
        learned.append(steps)
    assert encoders[0].passes == [2]
    assert encoders[1].passes == [2 * (3 * 1 + 4)], "for each set of weights, and for each gradient"
    for ours, expected in zip(*learned, strict=True):
        for name, gradient in ours.items():
            off = mx.linalg.norm(gradient - expected[name]).item()
            assert off <= 1e-6 * mx.linalg.norm(expected[name]).item() + 1e-9, name
    assert any(name.startswith("eye.second.") for name in learned[0][0])


def test_other_weights_of_a_frozen_tower_see_for_themselves() -> None:
    encoder = SeeingEncoder(("eye.second",))
    _, trainer = built(encoder)
    row = ROWS[0].rollout
    [before] = trainer.logprobs([row])
    arrays = dict(tree_flatten(built(SeeingEncoder(()))[0].model.parameters()))
    arrays["eye.first.weight"] = 2 * arrays["eye.first.weight"]
    trainer.policy.use_reference(arrays)
    with trainer.policy.reference():
        [other] = trainer.logprobs([row])
    [after] = trainer.logprobs([row])
    assert np.abs(other - before).max() > 1e-3 and np.array_equal(after, before)
    assert encoder.passes == [3]


def test_an_adapter_of_the_tower_itself_does_not_see_what_is_kept() -> None:
    encoder = SeeingEncoder(("eye.second",))
    loaded, _ = built(encoder)
    weights = SharedWeights(loaded.model, keep_versions=1)
    lora = prepare_for_serving(loaded.model)
    features = ImageFeatures(encoder.over(loaded.model), admit_images(loaded.model), lora.activate)
    shapes = {"eye.first": (PIXELS, 16), "eye.second": (16, WIDTH)}
    for path, (inputs, outputs) in shapes.items():
        pair = mx.random.normal((inputs, 2)), mx.random.normal((2, outputs))
        weights.add_adapter(path, {path: LoraPair(*pair, 0.5)})
    tokens = image_ids((1, *[IMAGE] * 4), (PICTURES["cat"],), IMAGE)
    seen = {}
    for name in (None, *shapes, None):
        slot = None if name is None else weights.find(name)
        text = GivenText(slot, Carried((PICTURES["cat"],)))
        [new] = features.prepare([(tokens, text)]) or [seen[None]]
        seen[name] = new
    assert encoder.passes == [2], "the base's, and the first adapter's"
    eye, image = loaded.model.eye, mx.array(PICTURES["cat"].arrays["pixels"])
    for name in shapes:
        lora.activate([weights.find(name)])
        expected = eye.second(eye.before(image))
        assert mx.allclose(seen[name], expected, atol=1e-5).item()
        assert not mx.allclose(seen[name], seen[None], atol=1e-2).item()


def test_full_weights_are_loaded_whole_or_not_at_all(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"lora": {"enabled": False}}
    _, trained = built(SeeingEncoder(("eye.second",)), **settings)
    slots = trained.policy.slots
    slots.write([array + 1 for array in slots.read()])
    save_model(tmp_path, trained.policy.model)
    _, same = built(SeeingEncoder(("eye",)), **settings)
    same.policy.load(tmp_path)
    assert mx.array_equal(same.policy.model.eye.second.bias, trained.policy.model.eye.second.bias)
    _, frozen = built(SeeingEncoder(()), **settings)
    for load in (frozen.policy.load, frozen.policy.saved):
        with pytest.raises(CheckpointError, match=r"eye\.second"):
            load(tmp_path)


def test_a_connector_without_linear_layers_learns_with_full_weights_alone() -> None:
    with pytest.raises(AdapterError, match=r"eye\.norm.*lora\.enabled"):
        built(SeeingEncoder(("eye.norm",)))
    configure_logging(level="warning")
    with capture_logs() as lines:
        _, trainer = built(SeeingEncoder(("eye.second", "eye.norm")))
    assert [line["module"] for line in lines if "stays as it is" in line["event"]] == ["eye.norm"]
    assert [n for n in trainer.policy.slots.names if n.startswith("eye")] == [
        "eye.second.lora_a",
        "eye.second.lora_b",
    ]


@pytest.mark.parametrize("trained", [(), ("eye",)])
def test_scores_between_steps_keep_no_more_features_than_they_may(trained: tuple[str, ...]) -> None:
    encoder = SeeingEncoder(trained)
    encoder.cache_bytes = 1  # less than an image's
    _, trainer = built(encoder)
    assert trainer.companions["images"] is not None
    for image in (CAT, DOG, CAT):
        row = sequence(7, image, answer=(20, 21))
        trainer.logprobs([row.rollout])
        assert list(trainer.companions["images"]._places) == [image[0]]
