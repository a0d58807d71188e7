"""An inference that says what it is told to, for environments that are played without an engine."""


class Says:
    """`answers` in their order; what it was asked is in `prompts`."""

    def __init__(self, *answers: str) -> None:
        self.answers, self.prompts = list(answers), []

    def generate(self, prompts, **options):
        self.prompts += prompts
        return [self.answers.pop(0) for _ in prompts]


def play(environment, state=None):
    """The last state of an episode."""
    state = state or environment.reset()
    while not environment.is_terminal(state):
        state = environment.step(state)
    return state
