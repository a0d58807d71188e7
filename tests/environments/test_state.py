import pytest

from mlx_parallm.environments.kinds.simple_text import SimpleTextEnvironment
from mlx_parallm.environments.registry import create_environment
from mlx_parallm.environments.state import BaseEnvironment, State
from mlx_parallm.errors import ConfigError, RolloutRejectedError


class Echoing:
    """Answers with the prompt's last word."""

    def generate(self, prompts):
        return [prompt.split()[-1] for prompt in prompts]


class Printed(BaseEnvironment):
    """As the specification prints one."""

    def reset(self):
        return State(prompt="Your task...")

    def step(self, state):
        response = self.inference.generate([state.prompt])[0]
        state.response = response
        state.step_count += 1
        return state

    def is_terminal(self, state):
        return state.step_count >= 10 or "DONE" in state.response

    def build_prompt(self, state):
        return state.prompt

    def update_state(self, state, response):
        state.response = response
        return state


class Minimal(BaseEnvironment):
    def reset(self, index=0):
        return State(prompt=f"Say {index}", metadata={"seen": []})


def test_a_copy_of_a_state_shares_nothing_with_it():
    state = State(prompt=[{"role": "user", "content": "Hi"}], metadata={"spent": [1.0]})
    state.add_turn(state.prompt, "Ho")
    other = state.copy()
    other.metadata["spent"].append(2.0)
    other.prompt.append({"role": "user", "content": "And?"})
    other.add_turn("And?", "No")
    assert state.to_dict() == {
        "prompt": [{"role": "user", "content": "Hi"}],
        "response": "Ho",
        "step_count": 1,
        "done": False,
        "history": [{"prompt": "Hi", "response": "Ho"}],
        "metadata": {"spent": [1.0]},
        "turn_reward": None,
        "trajectory_id": "",
    }
    assert other.step_count == 2


def test_a_state_comes_back_from_its_dictionary():
    state = State(prompt="Hi", metadata={"answer": "Ho"}, trajectory_id="g/1")
    state.add_turn("Hi", "Ho")
    saved = state.to_dict()
    assert State.from_dict(saved) == state
    State.from_dict(saved).metadata["answer"] = "changed"
    assert saved["metadata"] == {"answer": "Ho"}
    with pytest.raises(ValueError, match="a State has no promt"):
        State.from_dict({"promt": "Hi"})


def test_the_environment_of_the_specification_plays_by_hand():
    environment = Printed(Echoing())
    state = environment.reset()
    while not environment.is_terminal(state):
        state = environment.step(state)
    assert (state.step_count, state.response) == (10, "task...")


def test_a_step_counts_and_is_in_the_history_whoever_wrote_update_state(warned):
    class Forgetful(Minimal):
        def update_state(self, state, response):
            state.metadata["seen"].append(response)
            return state

    class LooksAtTheCount(Forgetful):
        def update_state(self, state, response):
            state.done = state.step_count == 2
            return super().update_state(state, response)

    inference = Echoing()
    for environment in (Minimal(inference), LooksAtTheCount(inference), Forgetful(inference)):
        state = environment.step(environment.step(environment.reset(3)))
        assert (state.response, state.step_count) == ("3", 2)
        assert state.history == [{"prompt": "Say 3", "response": "3"}] * 2
    assert state.metadata["seen"] == ["3", "3"]
    [line] = warned
    assert line["event"].startswith("LooksAtTheCount.update_state reads step_count")


def test_what_is_missing_is_told_in_words():
    class NoState(Minimal):
        def update_state(self, state, response):
            return None

    class Async(Minimal):
        async def update_state(self, state, response):
            return state

    with pytest.raises(RolloutRejectedError, match=r"Minimal.*inference"):
        Minimal().step(State(prompt="Hi"))
    with pytest.raises(RolloutRejectedError, match=r"NoState\.update_state"):
        NoState(Echoing()).step(State(prompt="Hi"))
    with pytest.raises(RolloutRejectedError, match=r"Async\.update_state"):
        Async(Echoing()).step(State(prompt="Hi"))


def test_simple_text_goes_round_and_ends_at_a_signal():
    class Writing:
        answers = iter(["well", "then [DONE]", "x", "y", "z"])

        def generate(self, prompts):
            return [next(self.answers)]

    environment = SimpleTextEnvironment(Writing(), prompts=["A:", "B:"], max_steps=3)
    assert [environment.reset().prompt for _ in range(3)] == ["A:", "B:", "A:"]
    assert environment.reset(index=5).prompt == "B:"
    state, asked = environment.reset(index=0), []
    while not environment.is_terminal(state):
        asked.append(environment.build_prompt(state))
        state = environment.step(state)
    assert asked == ["A:", "A:well"]
    state = environment.reset(index=1)
    while not environment.is_terminal(state):
        state = environment.step(state)
    assert (state.step_count, environment.build_prompt(state)) == (3, "B:xyz")


def test_environments_are_made_by_their_kind():
    environment = create_environment("simple_text", prompts=["A:"], max_steps=2)
    assert isinstance(environment, SimpleTextEnvironment)
    assert environment.max_steps == 2
    with pytest.raises(ConfigError, match=r"'simple_txt'.*'simple_text'"):
        create_environment("simple_txt")
    with pytest.raises(ConfigError, match=r"called with \(prompt="):
        create_environment("simple_text", prompt="A:")
    for options in ({"prompts": []}, {"prompts": "A:"}, {"prompts": ["A:"], "max_steps": 0}):
        with pytest.raises(ConfigError, match="expected"):
            create_environment("simple_text", **options)
