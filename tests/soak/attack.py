"""Attacks on a real server and real trainings: those that got through once, and some that have
always held.

    .venv/bin/python -m tests.soak.attack                 # all: about ten minutes
    .venv/bin/python -m tests.soak.attack --only gzip

Prints a table; exit code 1 when one gets through. An attack is a function in a module that is
imported below (attack_target.py says how). Everything goes to 127.0.0.1 and to processes that this
script has started.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

from tests.soak import attack_clients, attack_sandbox, attack_server, attack_sieges
from tests.soak.attack_target import ATTACKS, Attack, Target

MODULES = (
    attack_server,
    attack_sandbox,
    attack_clients,
    attack_sieges,
)  # importing one fills the table


def carry_out(chosen: Attack, target: Target) -> tuple[bool, str]:
    """Return whether it held, and what was seen."""
    try:
        return True, chosen.run(target)
    except Exception as error:  # noqa: BLE001  whatever it raises, it did not hold
        said = " ".join(str(error).split())[-300:]
        return False, said or f"{type(error).__name__} without a word"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="attacks whose name holds this text"
    )
    chosen = [each for each in ATTACKS if parser.parse_args().only in each.name]
    through = []
    with tempfile.TemporaryDirectory(prefix="attack_") as directory:
        target = Target(Path(directory))
        try:
            for each in chosen:
                started = time.monotonic()
                held, seen = carry_out(each, target)
                through += [] if held else [each.name]
                kind, verdict = (
                    "found" if each.got_through else "held before",
                    "held" if held else "GOT THROUGH",
                )
                print(
                    (
                        f"{verdict:11} | {each.name} ({kind}) |"
                        f" {time.monotonic() - started:.0f} s | {seen}"
                    ),
                    flush=True,
                )
        finally:
            target.close()
    print(f"{len(chosen) - len(through)} of {len(chosen)} held", *through, sep="\n  ")
    return 1 if through else 0


if __name__ == "__main__":
    sys.exit(main())
