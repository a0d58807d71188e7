"""Each soak at its full length: minutes to an hour, `scripts/test -m long tests/soak -k chaos`.

A soak is a module that is also a command (`python -m tests.soak.chaos --requests 100`); its
docstring says what must hold, and its exit code whether it did. Their short forms are beside what
they try.
"""

import subprocess
import sys

import pytest

from tests.docs.docs_blocks import ROOT

SOAKS = [
    "adapter_loads --loads 2000 --publishes 2000 --samplers 200",
    "attack",
    "chaos --requests 2000",
    "chat_round_trip --conversations 2000",
    "fuzz_logs --logs 10000",
    "fuzz_openapi --cases 2000",
    "fuzz_openapi --cases 2000 --prompt-policy",
    "gpu_faults --faults 300 --groups 40 --zeros 100 --hangs 4",
    "hostile_images --count 500",
    "kill_rollouts --kills 20",
    "malformed_groups",
    "prefix_disk --conversations 200 --turns 8 --kills 20",
    "resume_bits --kills 10",
    "soak --minutes 20",
    "structured --schemas 500 --seeds 10",
    "tool_faults --episodes 1000",
]


@pytest.mark.long
@pytest.mark.timeout(0)
@pytest.mark.parametrize("words", SOAKS)
def test_it_holds(words: str) -> None:
    module, *arguments = words.split()
    subprocess.run([sys.executable, "-m", f"tests.soak.{module}", *arguments], cwd=ROOT, check=True)
