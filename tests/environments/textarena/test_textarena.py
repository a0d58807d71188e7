"""Games of TextArena: alone, against other players, and with all seats trained. The policy is
scripted: it sees whose turn it is from its prompt."""

import random
import re
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from mlx_parallm.config.environment import EnvironmentConfig
from mlx_parallm.environments.registry import build_sources, create_environment
from mlx_parallm.environments.runner import EpisodeRunner, GroupPlan
from mlx_parallm.environments.turn_policy import EpisodePolicy
from mlx_parallm.errors import AdapterError, ConfigError, RolloutRejectedError
from mlx_parallm.types import UNSCORED, Structure
from tests.environments.scripted_client import ScriptedClient

textarena = pytest.importorskip("textarena")
from mlx_parallm.environments.textarena.game import Game  # noqa: E402

TURN = "<|im_start|>assistant\n"


def source(id="TicTacToe-v0", *, seed=0, fields=None, **options):
    entry = EnvironmentConfig(kind="textarena", options={"id": id, **options}, **fields or {})
    [built] = build_sources([entry], seed=seed)
    return built


def moves(tokenizer, *of_players, other=()):
    """A policy that makes the moves of its seat in turn; other weights make those of `other`."""

    def answer(request, _):
        text = tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False)
        seat = int(re.search(r"You are Player (\d)", text)[1])
        mine = other if request.adapter != "policy" else of_players[seat]
        return mine[text.count(TURN) - 1]

    return ScriptedClient(tokenizer, answer)


async def played(tokenizer, client, built, *, size=1, index=0, longest=2000, max_steps=None):
    plan = GroupPlan("g", built, index, size, seed=1, index=index, max_steps=max_steps)
    policy = EpisodePolicy(client, tokenizer, 1.0, longest, adapter="policy")
    [result] = await EpisodeRunner(policy).run([plan])
    return result


def facts(result, *names):
    return [tuple(t.metadata[name] for name in names) for t in result.trajectories]


def rewards(result):
    return [rollout.reward for rollout in result.group.rollouts]


class Versions:
    """The versions 4 to 7 of a policy, 7 being the newest, and 0 on disk."""

    policy, version = "policy", 7

    def __init__(self):
        self.history, self.held, self.loaded = self, [], []

    def versions(self):
        return [0, 4, 5, 6, 7]

    def in_memory(self, version):
        return version if version in (*self.held, 4, 5, 6, 7) else None

    def loader(self, name):
        version = int(name.removeprefix("policy@"))
        if self.in_memory(version) is not None:
            return None
        place = threading.get_ident()

        def load():
            assert threading.get_ident() != place, "MLX on the thread of an environment"
            self.loaded.append(version)

        return load

    def hold(self, version):
        if version not in self.versions():
            raise AdapterError(f"version {version} is not kept")
        assert version or 0 in self.loaded, "this would read it from disk here"
        self.held.append(version)


def against(built, **inference):
    built.attach(SimpleNamespace(weights=Versions(), **inference))
    return built


# ---------------------------------------------------------------------- one game


def deal(id, seed, players=1):
    return Game(id, {}, players=players, seed=seed, whole=False)


def test_a_seed_is_a_deal_and_the_process_keeps_its_numbers():
    random.seed(1), np.random.seed(1)
    expected = (random.random(), np.random.random())
    random.seed(1), np.random.seed(1)
    secrets = [
        deal("GuessTheNumber-v0", seed)._base.state.game_state["game_number"]
        for seed in (5, 5, *range(6, 12))
    ]
    assert secrets[0] == secrets[1] and len(set(secrets)) > 2
    assert (random.random(), np.random.random()) == expected


def test_nothing_is_downloaded(monkeypatch):
    import nltk

    asked = []
    monkeypatch.setattr(nltk, "download", lambda *names, **_: asked.append(names))
    with pytest.raises(ConfigError, match=r"'words'.*nltk.downloader"):
        source("Wordle-v0")
    assert not asked
    nltk.download("words")  # is itself again
    assert asked


# ---------------------------------------------------------------------- one player


async def test_one_player_reads_what_is_new_and_is_rewarded_by_the_game(tokenizer):
    built = source("GuessTheNumber-v0", action_of=r"\d+", regex=r"[^\[]+")
    game = deal("GuessTheNumber-v0", built.task(0).columns["seed"])
    secret = game._base.state.game_state["game_number"]
    wrong = secret - 1 if secret > 1 else 2
    client = moves(tokenizer, [f"Is it {wrong}?", f"Not {wrong} but {secret}!"])
    result = await played(tokenizer, client, built, size=2)
    assert result.failure is None, result.failure
    assert client.requests[0].params.n == 2 and len(client.requests) == 3  # one opens the group
    held = {request.params.structure for request in client.requests}
    assert held == {Structure("regex", r"[^\[]+")}
    assert rewards(result) == [1.0, 1.0]
    assert facts(result, "player", "turns", "played", "invalid_move") == [(0, 2, True, False)] * 2
    [first, second] = result.trajectories[0].history
    assert first.prompt.startswith("[GAME] You are Player 0. You are playing Guess The Number.")
    assert second.prompt == f"[GAME] The target number is {'high' if secret > 1 else 'low'}er."


async def test_the_whole_observation_is_one_message_a_turn(tokenizer):
    built = source("GuessTheNumber-v0-train", observations="whole")
    client = moves(tokenizer, ["[50]"])  # not allowed; asked again, and then it is over
    result = await played(tokenizer, client, built)
    assert result.failure is None, result.failure
    assert facts(result, "reward", "invalid_move", "turns") == [(0.0, True, 2)]
    [rollout] = result.group.rollouts
    assert len(rollout.segments) == 2  # each turn begins anew
    again = result.trajectories[0].history[1].prompt
    assert again.startswith("You are Player 0.")


# ---------------------------------------------------------------------- all seats are trained


async def test_both_sides_of_a_game_learn_from_their_own_result(tokenizer):
    """0 takes the upper row: two games of two players are a group of four."""
    built = source(fields={"reward_options": {"result": {"baseline": "group"}}})
    client = moves(tokenizer, ["[0]", "[1]", "[2]"], ["[3]", "I take [4]"])
    result = await played(tokenizer, client, built, size=4)
    assert result.failure is None, result.failure
    assert rewards(result) == [1.0, -1.0, 1.0, -1.0]
    assert facts(result, "player", "opponent", "turns") == [(n, "policy", 5) for n in (0, 1, 0, 1)]
    assert {rollout.scores["metrics/player_0/won"] for rollout in result.group.rollouts} == {1.0}
    assert {rollout.scores["metrics/player_1/reward"] for rollout in result.group.rollouts} == {-1}
    texts = [[turn.response for turn in t.history] for t in result.trajectories]
    assert texts == [["[0]", "[1]", "[2]"], ["[3]", "I take [4]"]] * 2
    _, second = result.trajectories[1].history
    assert "Player 0 placed their symbol" in second.prompt and "You are Player" not in second.prompt
    for trajectory, answers in zip(result.trajectories, texts, strict=True):
        rollout = trajectory.rollout
        ids = [t for t, m in zip(rollout.tokens, rollout.mask, strict=True) if m]
        said = tokenizer.decode(ids, skip_special_tokens=False)
        assert said == "".join(f"{answer}<|im_end|>" for answer in answers)


async def test_a_seat_that_no_rollout_has_is_played_by_the_policy_beside_it(tokenizer):
    built = source()
    client = moves(tokenizer, ["[0]", "[1]", "[2]"], ["[3]", "[4]"])
    result = await played(tokenizer, client, built, size=3)
    assert result.failure is None, result.failure
    assert facts(result, "player", "reward") == [(0, 1.0), (1, -1.0), (0, 1.0)]
    assert {request.adapter for request in client.requests} == {"policy"}
    assert sum("player 1" in request.request_id for request in client.requests) == 2


async def test_a_player_that_had_no_turn_is_not_scored(tokenizer):
    """0 makes two moves that are not allowed: 1 has won before its first turn."""
    built = source()
    client = moves(tokenizer, ["[9]", "[9]"], ["[0]"])
    result = await played(tokenizer, client, built, size=4)
    assert result.failure is None, result.failure
    assert (
        facts(result, "reward", "invalid_move", "played")
        == [
            (-1.0, True, True),
            (1.0, False, False),
        ]
        * 2
    )
    scored = [UNSCORED not in rollout.scores for rollout in result.group.rollouts]
    assert scored == [True, False, True, False]
    assert result.group.rollouts[1].zero_advantage
    assert result.group.rollouts[0].scores["metrics/player_1/won"] == 1.0


async def test_a_baseline_for_each_seat(tokenizer):
    """In one of two games 1 wins: 0 has 1 and -1 (mean 0); with three games 1, 1, -1."""

    def answer(request, _):
        text = tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False)
        seat, turn = int(re.search(r"You are Player (\d)", text)[1]), text.count(TURN) - 1
        lost = request.request_id.startswith(("g/4/", "g/5/"))
        winner, loser = ["[0]", "[1]", "[2]"], ["[3]", "[7]", "[8]"]
        if lost:
            winner, loser = ["[0]", "[1]", "[8]"], ["[3]", "[4]", "[5]"]
        return (winner, loser)[seat][turn]

    built = source(fields={"reward_options": {"result": {"baseline": "role"}}})
    result = await played(tokenizer, ScriptedClient(tokenizer, answer), built, size=6)
    assert facts(result, "reward") == [(1,), (-1,), (1,), (-1,), (-1,), (1,)]
    assert rewards(result) == pytest.approx([2 / 3, -2 / 3, 2 / 3, -2 / 3, -4 / 3, 4 / 3])


async def test_without_room_for_its_turn_a_player_loses(tokenizer):
    built = source()
    client = moves(tokenizer, ["[0]", "[1]", "[2]"], ["[3]", "[4]"])
    await played(tokenizer, client, built, size=2)
    first, second, third, *_ = [len(request.prompt_token_ids) for request in client.requests]
    assert first < second < third  # the third is 0's second turn
    result = await played(tokenizer, client, built, size=2, longest=third)
    assert result.failure is None, result.failure
    assert facts(result, "reward", "turns") == [(-1.0, 2), (1.0, 2)]
    assert [t.out_of_room for t in result.trajectories] == [True, False]
    assert [t.rollout.stop_reason for t in result.trajectories] == ["length", "stop"]


@pytest.mark.parametrize("limit", ["turns", "steps"])
async def test_a_limit_ends_the_game_as_a_draw(tokenizer, limit):
    built = source(max_turns=2) if limit == "turns" else source()
    client = moves(tokenizer, ["[0]", "[1]"], ["[3]", "[4]"])
    max_steps = 1 if limit == "steps" else None
    result = await played(tokenizer, client, built, size=2, max_steps=max_steps)
    assert facts(result, "reward", "reason", "turns") == [(0.0, f"the limit of {limit}", 2)] * 2


async def test_what_fails_in_a_game_fails_for_all_of_its_players(tokenizer, tmp_path):
    path = tmp_path / "own.py"
    path.write_text("def action(text):\n    raise ValueError('no action')\n")
    built = source(action_of=f"python:{path}:action")
    result = await played(tokenizer, moves(tokenizer, ["a"], ["b"]), built, size=2)
    assert result.failure.endswith("ValueError: no action")
    assert all("no action" in t.error for t in result.trajectories)
    assert not built._tables


# ---------------------------------------------------------------------- other players


@pytest.mark.parametrize(
    ("opponent", "adapter", "label"),
    [
        ("policy@4", "policy@4", "policy@4"),
        ("policy@0", "policy@0", "policy@0"),
        ("policy@-2", "policy@5", "policy@5"),
        ("policy@-5", "policy@0", "policy@0"),
        ("policy@-9", "policy@0", "policy@0"),
        ("base", None, "base"),
    ],
)
async def test_the_opponent_is_frozen(tokenizer, opponent, adapter, label):
    built = against(source(opponent=opponent))
    client = moves(
        tokenizer, ["[0]", "[1]", "[2]"], ["[0]", "[1]", "[2]"], other=["[3]", "[4]", "[8]"]
    )
    result = await played(tokenizer, client, built, size=2, index=0)
    assert result.failure is None, result.failure
    assert facts(result, "player", "reward", "opponent") == [(0, 1.0, label)] * 2
    assert {r.adapter for r in client.requests} == {"policy", adapter}
    fixed = re.fullmatch(r"policy@(\d)", opponent)
    # once, and also while it is among the newest: later it is not
    assert built._weights.held == ([int(fixed[1])] if fixed else [])
    assert all(t.step_count == 3 for t in result.trajectories)
    second = await played(tokenizer, client, built, size=2, index=1)  # the other seat begins
    assert facts(second, "player", "reward") == [(1, 1.0)] * 2


async def test_a_version_that_is_gone_is_a_reason(tokenizer):
    built = against(source(opponent="policy@2"))
    result = await played(tokenizer, moves(tokenizer, [], []), built)
    assert "'policy@2': version 2" in result.failure


async def test_a_scripted_opponent_and_a_choice_of_them(tokenizer, tmp_path):
    path = tmp_path / "own.py"
    path.write_text(
        "def first(observation):\n"
        "    return observation.rpartition('Available Moves: ')[2].strip(\"'\").split(\"'\")[0]\n"
    )
    scripted = f"python:{path}:first"
    built = source(opponent=scripted, seat=1)
    client = moves(tokenizer, [], ["[4]", "[8]", "[7]"])  # the other one takes 0, 1, 2
    result = await played(tokenizer, client, built)
    assert facts(result, "player", "reward", "opponent") == [(1, -1.0, scripted)]
    several = against(source(opponent=[scripted, "base", "policy@-1"]))
    assert {several.task(n).columns["opponent"] for n in range(20)} == set(
        several.settings.opponents
    )


def test_games_differ_and_are_repeated():
    first, again, other = source("KuhnPoker-v0"), source("KuhnPoker-v0"), source(seed=1)
    assert [first.task(n).key for n in range(4)] == [again.task(n).key for n in range(4)]
    assert len({source.task(0).key for source in (first, other)}) == 2
    assert len({first.task(n, "heldout").key for n in range(4)}) == 4
    assert other.task(0, "heldout").columns["seed"] == first.task(0, "heldout").columns["seed"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"id": "TicTacTo-v0"}, r"no game 'TicTacTo-v0'; did you mean 'TicTacToe-v0'\?"),
        ({"id": "Debate-v0"}, "OpenRouter API key not found"),
        ({"id": "TicTacToe-v0", "players": 3}, "number of players has to be 2"),
        ({"id": "TicTacToe-v0", "oponent": "x"}, "no option 'oponent'; did you mean 'opponent'"),
        ({}, "needs the option 'id'"),
        ({"id": "TicTacToe-v0", "opponent": "you"}, "expected .policy., .policy@VERSION"),
        ({"id": "TicTacToe-v0", "opponent": ["policy", "base"]}, "its own entry"),
        ({"id": "TicTacToe-v0", "seat": 2}, 'expected "alternate" or 0 to 1'),
        ({"id": "TicTacToe-v0", "observations": "old"}, 'observations: "new" or "whole"'),
        ({"id": "TicTacToe-v0", "action_of": "["}, "unterminated character set"),
        ({"id": "TicTacToe-v0", "max_turns": 0}, "at least 1"),
        ({"id": "TicTacToe-v0", "make": {"colour": 1}}, "unexpected keyword argument 'colour'"),
    ],
)
def test_what_cannot_be_played_is_refused(options, message):
    entry = EnvironmentConfig(kind="textarena", options=options)
    with pytest.raises(ConfigError, match=message):
        build_sources([entry], seed=0)


def test_what_is_not_there_is_refused():
    with pytest.raises(ConfigError, match="prompt_format"):
        source(fields={"prompt_format": "text"})
    with pytest.raises(ConfigError, match="played with an engine"):
        create_environment("textarena", id="TicTacToe-v0")
    with pytest.raises(ConfigError, match="adapter"):
        source(opponent="policy@-1").attach(SimpleNamespace(weights=SimpleNamespace(policy=None)))
    with pytest.raises(RolloutRejectedError, match=r"step: .*IndexError"):
        game = deal("GuessTheNumber-v0", 0)
        game._base.state.observations = {}
        game._base.step = lambda action: [][0]
        game.act(0, "[1]")
