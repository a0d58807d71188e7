"""examples/typescript/agent.ts trains the model that it talks to;
scripts/bench/typescript_agent.py has three seeds."""

import shutil
import statistics
from pathlib import Path

import pytest

from scripts.bench import typescript_agent

# the client's own `npm test` has its calls; this installs the AI SDK
pytestmark = [pytest.mark.slow, pytest.mark.long]


@pytest.mark.skipif(shutil.which("npm") is None, reason="it needs Node.js with npm")
def test_the_agent_raises_its_own_reward(tmp_path: Path) -> None:
    typescript_agent.install()
    rewards = typescript_agent.train(0, 20, tmp_path)
    assert len(rewards) == 20
    assert statistics.fmean(rewards[-5:]) > statistics.fmean(rewards[:5]) + 0.1
