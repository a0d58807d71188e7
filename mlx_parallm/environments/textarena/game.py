"""One game of TextArena: whose turn it is, that player's observation, and the result of each
player.

TextArena fetches word lists of nltk when a module of it is imported. Here nothing is fetched: a
game whose word list is missing is refused with the reason. Games draw from the random numbers of
the process; dealing one seeds them, so they are put back after it.
"""

import random
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from mlx_parallm.errors import ConfigError, RolloutRejectedError
from mlx_parallm.execution.user_code import did_you_mean, user_code
from mlx_parallm.system.packages import require

MOST_PLAYERS = 15  # in any game of TextArena 0.7
GAME = -1  # sender of the game's own messages
_ONE_AT_A_TIME = threading.RLock()  # nltk.download and random numbers belong to the process


class Game:
    """Use it from one thread at a time; different games on any threads."""

    def __init__(
        self, id: str, make: Mapping[str, Any], *, players: int, seed: int, whole: bool
    ) -> None:
        """Deal a game.

        Args:
            make: keywords of `textarena.make`.
            whole: a player reads what TextArena's observation wrapper returns, all of it each turn;
                otherwise the news since the player's last turn.

        Raises RolloutRejectedError: it cannot be made or dealt.
        """
        self.id, self.players, self.seed = id, players, seed
        self.done = False
        self.rewards: dict[int, float] = {}
        self.reasons: dict[int, str] = {}
        self.details: dict[int, dict[str, Any]] = {}
        self.turns = dict.fromkeys(range(players), 0)
        self._whole = whole
        with self._apart("make"), _numbers_put_back():
            self._env = _textarena().make(id, **make)
            self._env.reset(num_players=players, seed=seed)
            self._base = _base_of(self._env)

    def ask(self) -> tuple[int, str]:
        """Return whose turn it is and that player's observation."""
        with self._apart("get_observation"):
            seat, observation = (self._env if self._whole else self._base).get_observation()
            return int(seat), self._text(int(seat), observation)

    def opening(self, seat: int) -> str:
        """Return a player's unread observation, without taking its turn."""
        with self._apart("observations"):
            return self._text(seat, self._base.state.observations.get(seat, ()))

    def act(self, seat: int, action: str) -> None:
        """Take the turn of `seat`."""
        self.turns[seat] += 1
        with self._apart("step"):
            self.done, _ = self._env.step(action=action)
            if self.done:
                rewards, details = self._env.close()
        if self.done:
            self._end(rewards or {}, details or {})

    def stop(self, reason: str, rewards: Mapping[int, float] | None = None) -> None:
        """End the game before its rules do, with these rewards; default: 0 for everybody."""
        self.done = True
        self._end(rewards or {}, {})
        self.reasons = dict.fromkeys(range(self.players), reason)

    def forfeit(self, seat: int, reason: str) -> None:
        """End the game because a player cannot continue: it loses, and of two the other one
        wins."""
        others = {other: float(self.players == 2) for other in range(self.players)}
        self.stop(reason, others | {seat: -1.0})

    def role(self, seat: int) -> str:
        """Return the name under which the others know a player."""
        return str(self._base.state.role_mapping.get(seat, f"Player {seat}"))

    def _end(self, rewards: Mapping[Any, Any], details: Mapping[Any, Any]) -> None:
        for seat in range(self.players):
            self.rewards[seat] = float(rewards.get(seat, 0.0))
            self.details[seat] = dict(details.get(seat, {}))
            self.reasons[seat] = str(self.details[seat].get("reason") or "")

    def _text(self, seat: int, observation: Any) -> str:
        if isinstance(observation, str):
            return observation.strip()
        action = _textarena().ObservationType.PLAYER_ACTION
        return "\n".join(
            f"[{'GAME' if sender == GAME else self.role(sender)}] {str(message).strip()}"
            for sender, message, kind in observation
            if not (sender == seat and kind == action)  # the player's own words
        )

    @contextmanager
    def _apart(self, what: str) -> Iterator[None]:
        """Run the game's code. Raises RolloutRejectedError."""
        with (
            _ONE_AT_A_TIME,
            user_code(f"textarena: {self.id}: {what}", RolloutRejectedError),
            _no_download(),
        ):
            yield


def check_game(id: str, make: Mapping[str, Any], players: int | None) -> int:
    """Deal a game once; return its number of players, the smallest one if `players` is None.

    Raises ConfigError: there is no such game, or it cannot be played here.
    """
    registry = _textarena().envs.registration.ENV_REGISTRY
    if id not in registry:
        raise ConfigError(f"textarena: there is no game {id!r}{did_you_mean(id, list(registry))}")
    reason = ""
    for count in range(1, MOST_PLAYERS + 1) if players is None else (players,):
        try:
            Game(id, make, players=count, seed=0, whole=False).ask()
        except RolloutRejectedError as error:
            reason = str(error)
            if isinstance(error.__cause__, AssertionError):  # not with so many players
                continue
            raise ConfigError(_why(id, error)) from error
        return count
    raise ConfigError(f"textarena: {id}: players = {players or MOST_PLAYERS}: {reason}")


def _why(id: str, error: RolloutRejectedError) -> str:
    cause = error.__cause__
    if isinstance(cause, LookupError) and "nltk.download" in str(cause):
        name = str(cause).partition("nltk.download('")[2].partition("'")[0]
        return (
            f"textarena: {id} needs nltk's data {name!r}, which is not downloaded by itself:"
            f" python -m nltk.downloader {name}"
        )
    if isinstance(cause, SyntaxError):
        return f"textarena: {id} is written for a newer Python: {cause}"
    return str(error)


def _textarena() -> Any:
    require('environments: kind = "textarena"', "textarena")
    import textarena

    return textarena


def _base_of(env: Any) -> Any:
    """Return the game below TextArena's wrappers."""
    wrapper = _textarena().Wrapper
    while isinstance(env, wrapper):
        env = env.env
    return env


@contextmanager
def _numbers_put_back() -> Iterator[None]:
    python, numpy = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


@contextmanager
def _no_download() -> Iterator[None]:
    """Let nltk fetch nothing that this thread asks for."""
    import nltk

    download, here = nltk.download, threading.get_ident()

    def nothing(*names: Any, **options: Any) -> Any:
        return True if threading.get_ident() == here else download(*names, **options)

    nltk.download = nothing
    try:
        yield
    finally:
        nltk.download = download
