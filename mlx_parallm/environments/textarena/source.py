"""kind = "textarena": games of the textarena package, alone or against other players.

    game → text → the player whose turn it is → action → game …, until the game is over

The trained policy has one seat of each game against `opponent`, or, with opponent = "policy", all
of them: then the rollouts of a group are the players of its games, so both sides learn. The
players of a game are played by one of its episodes, the last one that sits down; the others wait
for the end. `results.py` has the rewards.

The metadata of an episode holds `game`, `seed`, `player` (its seat), `role`, `opponent`, `reward`,
`reason`, `invalid_move`, `turns` (of all players), and `played` (False: the game was over before
its first turn; it is asked once all the same, and not scored).
"""

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from mlx_parallm.config.environment import EnvironmentConfig
from mlx_parallm.environments.base import EnvironmentSource, PolicyInference, Split, Task
from mlx_parallm.environments.episode import Episode, EpisodeOver
from mlx_parallm.environments.group_order import derive_seed
from mlx_parallm.environments.textarena.game import Game, check_game
from mlx_parallm.errors import AdapterError, ConfigError, PatternTimeoutError, RolloutRejectedError
from mlx_parallm.execution.user_code import (
    is_reference,
    load_function_of,
    read_options,
    user_code,
)
from mlx_parallm.rewards.functions import RewardFunctions
from mlx_parallm.system.patterns import Pattern, PatternError
from mlx_parallm.types import Structure

SELF = "policy"
BASE = "base"
VERSION = re.compile(r"policy@(-?\d+)")
RESULT = "python:mlx_parallm.environments.textarena.results:result"

Player = Callable[[Sequence[Mapping[str, str]]], Awaitable[str]]
"""Returns the answer to a conversation. Raises EpisodeOver: there is no room for another turn."""


@dataclass(frozen=True)
class TextArenaOptions:
    """The options of an entry.

    Attributes:
        id: of the game, as `textarena.make` takes it; `make` holds its keywords.
        players: of the game; default: as few as it allows.
        opponent: who has the other seats: "policy" (the policy itself, all seats are trained),
            "policy@VERSION", "policy@-K" (K versions ago, or the oldest one that is kept), "base"
            (the untouched model), a function of the player's observation ("python:file.py:name"),
            or a list of these, one for each task.
        seat: of the policy beside an opponent; "alternate": another one in each task.
        observations: "new", the news since the player's last turn, as a conversation, or
            "whole", all that TextArena's wrapper of the game shows, as one message.
        action_of: the action in an answer: a regular expression, whose last match counts (its
            first group, if it has one), or a function ("python:file.py:name"); default: the whole
            answer.
        regex: a regular expression that every answer of a model is held to while it is sampled.
        max_turns: of a game, of all players together; then it is a draw.
    """

    id: str
    make: Mapping[str, Any] = field(default_factory=dict)
    players: int | None = None
    opponent: str | Sequence[str] = SELF
    seat: int | Literal["alternate"] = "alternate"
    observations: Literal["new", "whole"] = "new"
    action_of: str | None = None
    regex: str | None = None
    max_turns: int = 200

    def check(self) -> None:
        """Raises ConfigError: a value that means nothing."""
        if self.observations not in ("new", "whole"):
            raise ConfigError(
                f'textarena: observations: "new" or "whole", not {self.observations!r}'
            )
        if not isinstance(self.max_turns, int) or self.max_turns < 1:
            raise ConfigError(f"textarena: max_turns has to be at least 1, not {self.max_turns!r}")
        for name in self.opponents:
            if name not in (SELF, BASE) and not VERSION.fullmatch(name) and not is_reference(name):
                raise ConfigError(
                    f'textarena: opponent {name!r}: expected "policy", "policy@VERSION",'
                    ' "policy@-K", "base" or "python:file.py:name"'
                )
        if SELF in self.opponents and len(self.opponents) > 1:
            raise ConfigError(
                'textarena: opponent "policy" trains all seats: put it into its own entry'
            )

    @property
    def opponents(self) -> tuple[str, ...]:
        return (self.opponent,) if isinstance(self.opponent, str) else tuple(self.opponent)


class Seat:
    """One player's part of a game, as rewards see it."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self.metadata: dict[str, Any] = {**metadata, "reward": 0.0, "played": False}

    def take(self, game: Game, seat: int) -> None:
        """Note how the game went for a player."""
        self.metadata |= {
            "role": game.details[seat].get("role") or game.role(seat),
            "reward": game.rewards[seat],
            "reason": game.reasons[seat],
            "invalid_move": bool(game.details[seat].get("invalid_move")),
            "turns": sum(game.turns.values()),
            "played": game.turns[seat] > 0,
        }


@dataclass
class Table:
    """One game, and the episodes that play in it."""

    expected: int
    episodes: dict[int, Episode] = field(default_factory=dict)  # by seat
    over: asyncio.Event = field(default_factory=asyncio.Event)
    failure: str | None = None


class TextArenaSource(EnvironmentSource):
    several_turns = True

    def __init__(self, config: EnvironmentConfig, *, seed: int, name: str | None = None) -> None:
        """Raises ConfigError: package missing, no such game, one that cannot be played here, or
        wrong options."""
        super().__init__(config, seed=seed, name=name)
        what = "environments: textarena"
        self.settings = read_options(TextArenaOptions, config.options, what)
        self.settings.check()
        if config.prompt_format == "text":
            raise ConfigError(f'{what}: prompt_format = "text" is not for a game: it is a chat')
        self.players = check_game(self.settings.id, self.settings.make, self.settings.players)
        seat = self.settings.seat
        if seat != "alternate" and not (isinstance(seat, int) and 0 <= seat < self.players):
            raise ConfigError(
                f'{what}: seat is {seat!r}: expected "alternate" or 0 to {self.players - 1}'
            )
        self._action = _action_parser(self.settings.action_of)
        if self.settings.regex is not None:
            self.structure = Structure("regex", self.settings.regex, "textarena: regex")
        self._scripted = {
            name: load_function_of(("observation",), name, "textarena: opponent")
            for name in self.settings.opponents
            if is_reference(name)
        }
        self.rewards = self._scores = RewardFunctions.from_config(
            config, columns=None, default=(RESULT,)
        )
        self.all_seats = self.settings.opponents == (SELF,)
        self.opens_together = self.players == 1
        self._tables: dict[tuple[str, int], Table] = {}
        self._weights: Any = None
        self._holding: set[int] = set()  # versions that are played against

    def attach(self, inference: PolicyInference) -> None:
        """Raises ConfigError: there are no older weights to play against."""
        super().attach(inference)
        self._weights = getattr(inference, "weights", None)
        frozen = [name for name in self.settings.opponents if self._is_frozen(name)]
        if frozen and getattr(self._weights, "policy", None) is None:
            raise ConfigError(
                f"textarena: opponent {frozen[0]!r} needs an adapter that is trained"
                " (rl_training.lora) or model.lora_path: all weights are the policy's here"
            )

    def task(self, index: int, split: Split = "train") -> Task:
        """Return a game that every episode of a group plays from the same deal."""
        settings = self.settings
        seed = derive_seed(f"textarena {split}", self.seed if split == "train" else 0, index)
        seat = index % self.players if settings.seat == "alternate" else settings.seat
        opponents = settings.opponents
        opponent = opponents[derive_seed("opponent", seed) % len(opponents)]
        facts = {"game": settings.id, "seed": seed, "player": seat, "opponent": opponent}
        game = self._deal(seed)
        opening = game.ask()[1] if self.players == 1 else game.opening(seat)
        messages = self.open_with(({"role": "user", "content": opening},))
        return Task(
            key=f"{settings.id}:{seed}:{seat}",
            messages=messages,
            reward=self._scores.for_row([*messages], facts, self.progress),
            columns=facts,
        )

    async def play(self, episode: Episode, task: Task, max_steps: int) -> None:
        """Sit down; play the game, or wait for its end. Raises RolloutRejectedError: the game, or
        the episode of another player, has failed."""
        size = self.players if self.all_seats else 1
        first = episode.number - episode.number % size
        key = (episode.group_id, first)
        table = self._tables.setdefault(key, Table(min(size, episode.group_size - first)))
        seat = episode.number % size if self.all_seats else task.columns["player"]
        episode.played = Seat({**task.columns, "player": seat})
        table.episodes[seat] = episode
        if len(table.episodes) < table.expected:
            try:
                await table.over.wait()
            finally:
                self._tables.pop(key, None)
            if table.failure is not None:
                raise RolloutRejectedError(table.failure)
        else:
            self._tables.pop(key, None)
            table.failure = "the episode of another player was cut off"
            try:
                await self._play(table, task, max_steps)
                table.failure = None
            except RolloutRejectedError as error:
                table.failure = str(error)
                raise
            finally:
                table.over.set()

    async def _play(self, table: Table, task: Task, max_steps: int) -> None:
        game = self._deal(task.columns["seed"])
        await self._load(task.columns["opponent"])
        players, label = self._seated(table, task.columns["opponent"])
        talks: dict[int, list[dict[str, str]]] = {seat: [] for seat in players}
        while not game.done:
            seat, text = game.ask()
            if sum(game.turns.values()) >= self.settings.max_turns:
                game.stop("the limit of turns")
            elif game.turns[seat] >= max_steps and seat in table.episodes:
                table.episodes[seat].cut = True
                game.stop("the limit of steps")
            else:
                await self._turn(game, seat, players[seat], self._talk(talks[seat], text))
        for seat, episode in table.episodes.items():
            assert isinstance(episode.played, Seat)
            episode.played.take(game, seat)
            episode.played.metadata["opponent"] = label
            if not episode.turns:  # a rollout needs tokens
                await players[seat](self._talk([], game.opening(seat)))

    async def _turn(
        self, game: Game, seat: int, player: Player, talk: list[dict[str, str]]
    ) -> None:
        try:
            answer = await player(talk)
        except EpisodeOver:
            game.forfeit(seat, f"player {seat} has no room for another turn")
            return
        talk.append({"role": "assistant", "content": answer})
        with user_code("textarena: action_of", RolloutRejectedError):
            action = self._action(answer)
        game.act(seat, str(action))

    def _talk(self, talk: list[dict[str, str]], text: str) -> list[dict[str, str]]:
        """Add the player's observation to its conversation, and return that."""
        if self.settings.observations == "whole":
            talk.clear()
        talk.append({"role": "user", "content": text})
        return talk

    def _seated(self, table: Table, opponent: str) -> tuple[dict[int, Player], str]:
        """Return the player of each seat, and the opponent's name in the metadata."""
        label, other = opponent, self._opponent(opponent)
        if isinstance(other, str):
            label = other
        owner = next(iter(table.episodes.values()))
        players: dict[int, Player] = {}
        for seat in range(self.players):
            if seat in table.episodes:
                players[seat] = self._policy(table.episodes[seat])
            elif callable(other):
                players[seat] = other
            elif other == SELF:
                players[seat] = self._policy(owner.beside(f"player {seat}"))
            else:
                adapter = None if other == BASE else other
                players[seat] = self._policy(owner.beside(f"player {seat}", adapter))
        return players, label

    def _opponent(self, opponent: str) -> str | Player:
        """Return a scripted player, "policy", "base", or the adapter of a version."""
        if opponent in self._scripted:
            return _scripted(self._scripted[opponent])
        if not (version := VERSION.fullmatch(opponent)):
            return opponent
        if self._weights is None:
            raise RolloutRejectedError(f"opponent {opponent!r}: there is no engine in this process")
        return f"{self._weights.policy}@{self._version(version[1])}"

    async def _load(self, opponent: str) -> None:
        """Read a fixed version that lies on disk, on a thread that may wait and may use MLX."""
        version = VERSION.fullmatch(opponent)
        if version is None or version[1].startswith("-") or self._weights is None:
            return
        if (load := self._weights.loader(f"{self._weights.policy}@{version[1]}")) is not None:
            await asyncio.to_thread(load)

    def _version(self, wanted: str) -> int:
        """Return the version that "-K" or "VERSION" means now, and keep a fixed one."""
        history = self._weights.history
        if not wanted.startswith("-"):
            try:
                if int(wanted) not in self._holding:
                    history.hold(int(wanted))
                    self._holding.add(int(wanted))
            except AdapterError as error:
                raise RolloutRejectedError(f"opponent 'policy@{wanted}': {error}") from error
            return int(wanted)
        kept = history.versions()
        before = [version for version in kept if version <= self._weights.version + int(wanted)]
        return max(before) if before else min(kept)

    def _policy(self, episode: Episode) -> Player:
        async def answer(talk: Sequence[Mapping[str, str]]) -> str:
            prompt = self.open_with(tuple(talk))
            return (await episode.turn(prompt, structure=self.structure)).text

        return answer

    def _is_frozen(self, opponent: str) -> bool:
        return opponent == BASE or VERSION.fullmatch(opponent) is not None

    def _deal(self, seed: int) -> Game:
        return Game(
            self.settings.id,
            self.settings.make,
            players=self.players,
            seed=seed,
            whole=self.settings.observations == "whole",
        )


def _scripted(function: Callable[..., Any]) -> Player:
    async def answer(talk: Sequence[Mapping[str, str]]) -> str:
        with user_code("textarena: opponent", RolloutRejectedError):
            return str(function(talk[-1]["content"]))

    return answer


def _action_parser(option: str | None) -> Callable[[str], str]:
    """Raises ConfigError: neither a regular expression nor a function."""
    if option is None:
        return str
    if is_reference(option):
        function: Callable[[str], str] = load_function_of(("text",), option, "textarena: action_of")
        return function
    try:
        pattern = Pattern(option, re.DOTALL)
    except PatternError as error:
        raise ConfigError(f"textarena: action_of: {error}") from error

    def last_match(text: str) -> str:
        try:
            answer_part = pattern.last_part(text)
        except PatternTimeoutError as error:
            raise RolloutRejectedError(f"textarena: action_of: {error}") from error
        return text if answer_part is None else answer_part  # the game reports its fault

    return last_match
