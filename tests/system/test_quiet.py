"""A library's advice to its developers stays off the screen; its warnings do not."""

import os
import subprocess
import sys


def test_transformers_says_nothing_of_torch_and_still_warns() -> None:
    program = (
        "import mlx_parallm, transformers.utils.logging as logging; logger ="
        " logging.get_logger('transformers'); logger.warning('PyTorch was not found. Models');"
        " logger.warning('a real one')"
    )
    # another library of this process may have set it
    environment = {k: v for k, v in os.environ.items() if k != "TRANSFORMERS_VERBOSITY"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
    )
    assert "PyTorch" not in done.stderr and "a real one" in done.stderr
