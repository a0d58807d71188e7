"""Groups that other ranks play: real connections, scripted engines. tests/integration has real
ranks."""

import pickle
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_parallm.config.environment import EnvironmentConfig
from mlx_parallm.distributed.fingerprint import model_fingerprint
from mlx_parallm.distributed.players import (
    Broken,
    GroupOrder,
    Play,
    PlayedGroup,
    RankPlayer,
    RankRolloutWorker,
    StopPlaying,
    hang_up,
)
from mlx_parallm.environments.base import EnvironmentSource
from mlx_parallm.environments.manager import RolloutConfig, RolloutManager
from mlx_parallm.environments.registry import build_sources
from mlx_parallm.environments.runner import EpisodeRunner, GroupResult
from mlx_parallm.environments.turn_policy import EpisodePolicy
from mlx_parallm.errors import EngineUnavailableError, EnvironmentFailedError
from mlx_parallm.models.tokenizer import Tokenizer
from mlx_parallm.types import Request, RolloutGroup
from tests.environments.managing import Inbox, until
from tests.environments.scripted_client import Answer, ScriptedClient

VERSIONS = (3, 5, 8)  # that the ranks serve: each its own


def tasks(*names: str) -> tuple[EnvironmentSource, ...]:
    return build_sources(
        [EnvironmentConfig(kind="tasks", name=name, group_size=4) for name in names], seed=0
    )


class Run:
    """A manager on rank 0, and the ranks that play for it."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        answer: Answer,
        *,
        ranks: int = 3,
        fixed_order: bool = False,
        gate: object = None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._check = check
        self.inbox, self._closing = Inbox(), ExitStack()
        self.clients = [ScriptedClient(tokenizer, answer, gate=gate) for _ in range(ranks)]  # type: ignore[arg-type]
        for client, version in zip(self.clients, VERSIONS, strict=False):
            client.version = version
        self.players: list[RankPlayer] = []
        self.sources = tasks("sum", "sort")
        self.manager = RolloutManager(
            self.sources,
            RolloutConfig(seed=0, num_parallel=64 * ranks, max_token_length=256),
            client=self.clients[0],
            tokenizer=tokenizer,
            sink=self.inbox.sink,
            on_failure=self.inbox.failed,
            fixed_order=fixed_order,
            players=[self._rank(rank, tokenizer, fixed_order) for rank in range(1, ranks)],
        )

    def _rank(
        self, rank: int, tokenizer: Tokenizer, fixed_order: bool
    ) -> Callable[..., RankPlayer]:
        own, others = Pipe()
        client = self.clients[rank]
        policy = EpisodePolicy(client, tokenizer, temperature=1.0, max_token_length=256)
        played = RankRolloutWorker(
            others,
            tasks("sum", "sort"),
            EpisodeRunner(policy),
            fixed_order=fixed_order,
            check=self._check,
        )
        self._closing.callback(played.close)
        self._closing.callback(hang_up, own)

        def make(*listeners: Callable[..., None]) -> RankPlayer:
            self.players.append(RankPlayer(own, rank, *listeners))
            return self.players[-1]

        return make

    def __enter__(self) -> "Run":
        self.manager.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.manager.stop()
        self._closing.close()


def by_seed(request: Request, choice: int) -> str:
    return f"{request.params.seed}{choice}"


def by_id(groups: list[RolloutGroup]) -> dict[str, RolloutGroup]:
    """Without the version and the rank, which are each rank's own."""

    def plain(group: RolloutGroup) -> RolloutGroup:
        rollouts = tuple(
            replace(each, policy_versions=(0,) * len(each.tokens)) for each in group.rollouts
        )
        return replace(
            group,
            rollouts=rollouts,
            metadata={k: v for k, v in group.metadata.items() if k != "rank"},
        )

    return {group.group_id: plain(group) for group in groups}


@pytest.mark.parametrize("fixed_order", [True, False])
def test_groups_are_spread_and_are_those_of_one_rank(
    tiny_tokenizer: Tokenizer, fixed_order: bool
) -> None:
    with Run(tiny_tokenizer, by_seed, ranks=1, fixed_order=fixed_order) as alone:
        alone.manager.request_groups(12)
        expected = list(alone.inbox.wait(groups=12))
    with Run(tiny_tokenizer, by_seed, fixed_order=fixed_order) as run:
        run.manager.request_groups(12)
        groups = list(run.inbox.wait(groups=12))
    assert by_id(groups) == by_id(expected), (
        "the same tasks, seeds, answers and rewards; none twice"
    )
    for name in ("sum", "sort"):
        ids = [group.group_id for group in groups if group.environment == name]
        assert ids == [group.group_id for group in expected if group.environment == name], (
            "in the same order"
        )
    played = [[name for call in client.calls for name in call] for client in run.clients]
    assert sorted(name for each in played for name in each) == sorted(by_id(groups))
    for group in groups:
        rank = group.metadata.get("rank", 0)
        assert group.group_id in played[rank]
        assert set(group.sampled_versions) == {VERSIONS[rank]}, "the version that the rank served"
    if fixed_order:
        assert [len(client.calls) for client in run.clients] == [1, 1, 1], (
            "each rank's share is submitted at once"
        )
        assert [len(names) for names in played] == [4, 4, 4]


def test_what_a_lost_rank_had_not_finished_is_played_again(tiny_tokenizer: Tokenizer) -> None:
    """Alone, from the position that a checkpoint keeps and with the groups that the store has."""

    def gate(request: Request) -> float | None:
        return None if request.request_id in ("sum-0-1", "sort-0-2", "sum-0-4") else 0

    with Run(tiny_tokenizer, by_seed, ranks=2, gate=gate) as run:
        run.manager.request_groups(8)
        until(lambda: sum(len(client.requests) for client in run.clients) == 8)
        started = {request.request_id for client in run.clients for request in client.requests}
        state, stored = run.manager.state(), set(run.inbox.ids)
    alone = Run(tiny_tokenizer, by_seed, ranks=1)
    alone.manager.restore(state)
    alone.manager.skip(stored)
    with alone:
        alone.manager.request_groups(12)
        alone.inbox.wait(groups=12)
    assert started - stored <= set(alone.inbox.ids)
    assert not stored & set(alone.inbox.ids)


def test_failures_settings_and_bugs_reach_the_other_side(tiny_tokenizer: Tokenizer) -> None:
    def answer(request: Request, choice: int) -> str | Exception:
        return ValueError("no") if request.params.temperature == 0.5 and choice == 3 else "1"

    with Run(tiny_tokenizer, answer, ranks=2, fixed_order=True) as run:
        run.manager.use_temperature(0.5)
        run.manager.request_groups(2)
        run.inbox.wait(failures=2)
        assert {reason for _, reason in run.inbox.failures} == {"ValueError: no"}
        assert {
            request.params.temperature for client in run.clients for request in client.requests
        } == {0.5}


def test_an_environment_with_a_state_of_its_own_stays_on_one_rank(
    tiny_tokenizer: Tokenizer,
) -> None:
    run = Run(tiny_tokenizer, by_seed, ranks=2, fixed_order=True)
    run.sources[0].in_order = True
    with run:
        run.manager.request_groups(6)
        groups = run.inbox.wait(groups=6)
    assert {group.metadata.get("rank", 0) for group in groups if group.environment == "sum"} == {0}
    assert 1 in {group.metadata.get("rank", 0) for group in groups if group.environment == "sort"}


def test_a_bug_on_another_rank_ends_the_run(
    tiny_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(self: EpisodeRunner, plans: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(EpisodeRunner, "run", broken)
    with Run(tiny_tokenizer, by_seed, ranks=2) as run:
        run.manager._players[1].play([run.manager._queues[0].start(())])
        until(lambda: run.manager.health() is not None)
        with pytest.raises(EnvironmentFailedError, match="rank 1: RuntimeError"):
            run.manager.check()


def test_a_rank_whose_engine_has_died_ends_the_run(tiny_tokenizer: Tokenizer) -> None:
    """Its groups have failed at once, so it would get all others too, as the one with the fewest
    in flight."""

    def dead() -> None:
        raise EngineUnavailableError("the engine thread has ended")

    def answer(request: Request, choice: int) -> Exception:
        return EngineUnavailableError("the engine thread has ended")

    with Run(tiny_tokenizer, answer, ranks=2, check=dead) as run:
        run.manager._players[1].play([run.manager._queues[0].start(())])
        until(lambda: run.manager.health() is not None)
        with pytest.raises(EnvironmentFailedError, match=r"rank 1: .*thread"):
            run.manager.check()
        assert not run.inbox.failures


class Other:
    """A `RankPlayer`, whose other end the test has."""

    def __init__(self) -> None:
        own, self.end = Pipe()
        self.errors, self.results = list[str](), list[GroupResult]()
        self.player = RankPlayer(
            own, 2, self.results.extend, lambda error: self.errors.append(str(error))
        )

    def ended(self) -> None:
        with pytest.raises(EOFError):
            self.end.recv()


def test_a_rank_whose_groups_cannot_come_is_an_error() -> None:
    unknown = PlayedGroup(RolloutGroup("sum-0-7", "sum", ()), None, False, {})
    for message, error in (
        (pickle.dumps(unknown), "rank 2: KeyError: 'sum-0-7'"),
        (b"no message", "rank 2: UnpicklingError: "),
    ):
        other = Other()
        other.end.send_bytes(message)
        other.ended()
        until(lambda other=other: bool(other.errors))
        assert other.errors[0].startswith(error)
    closed, stopped = Other(), Other()
    closed.end.close()
    until(lambda: bool(closed.errors))
    assert closed.errors == ["rank 2: the connection for its groups is closed"]
    stopped.player.stop()
    assert stopped.end.recv() == StopPlaying()
    stopped.end.send(unknown)
    stopped.ended()
    assert not stopped.errors, "at the end of a run it is none"


def test_an_order_that_a_rank_cannot_carry_out_is_an_error(tiny_tokenizer: Tokenizer) -> None:
    own, others = Pipe()
    policy = EpisodePolicy(
        ScriptedClient(tiny_tokenizer, by_seed), tiny_tokenizer, temperature=1, max_token_length=9
    )
    RankRolloutWorker(
        others, tasks("sum"), EpisodeRunner(policy), fixed_order=False, check=lambda: None
    )
    own.send(Play((GroupOrder("sort", "sort-0-0", 0, 4, 0, 0, None),)))
    assert own.recv() == Broken("KeyError: 'sort'")


@pytest.fixture
def model(tmp_path: Path) -> Iterator[Path]:
    mx.random.seed(0)
    (tmp_path / "config.json").write_text("{}")
    mx.save_safetensors(
        str(tmp_path / "model.safetensors"),
        {"a": mx.random.normal((64, 64)), "b": mx.random.normal((8,))},
    )
    yield tmp_path


def test_a_fingerprint_tells_models_apart(model: Path) -> None:
    first = model_fingerprint(model)
    assert model_fingerprint(model) == first
    (model / "notes.txt").write_text("not a part of the model")
    assert model_fingerprint(model) == first
    arrays = dict(mx.load(str(model / "model.safetensors")))
    mx.save_safetensors(str(model / "model.safetensors"), arrays | {"b": arrays["b"] + 1e-6})
    second = model_fingerprint(model)
    assert second != first, "the same shapes, other numbers"
    (model / "tokenizer.json").write_text("{}")
    assert model_fingerprint(model) != second
