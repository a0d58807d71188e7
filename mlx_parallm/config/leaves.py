"""`Leaf`: the one way in which an optional part plugs into the core, and the tuple of all leaves.

A leaf is a folder that no core module imports. Its `leaf.py` holds `LEAF`: the section of the
configuration that it reads, and the hooks that it has. Everything in it is named as "module:name"
and imported when it is needed, so a start pays for nothing that it does not use. A folder that is
not there is no leaf, and nothing else changes.

Imports nothing but the standard library and `system/packages.py`: `mlx_parallm --help` reads the
leaves.
"""

import re
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from typing import Any, NoReturn

from mlx_parallm import __version__
from mlx_parallm.system.packages import is_installed

LEAVES = (
    "mlx_parallm.faces.atropos.leaf",
    "mlx_parallm.faces.mcp_server.leaf",
    "mlx_parallm.systems.traces.leaf",
    "mlx_parallm.faces.tinker.leaf",
    "mlx_parallm.systems.prompt_policy.leaf",
    "mlx_parallm.systems.orchestrator.leaf",
    "mlx_parallm.runs.dashboard.leaf",
    "mlx_parallm.deploy.export.leaf",
    "mlx_parallm.systems.pipeline.leaf",
    "mlx_parallm.systems.vision.leaf",
    "mlx_parallm.rl_training.distillation.leaf",
    "mlx_parallm.systems.feedback.leaf",
    "mlx_parallm.environments.textarena.leaf",
    "mlx_parallm.environments.openenv.leaf",
    "mlx_parallm.environments.task_folders.leaf",
)
"""Every leaf, one line each, in the order of their sections and commands."""


@dataclass(frozen=True)
class Command:
    """A command of `mlx_parallm`.

    Attributes:
        arguments: "module:name" of its `config.arguments.Arguments`: its flags, and what carries it
            out.
        script: the name that `pyproject.toml` installs for it beside `mlx_parallm`.
        ends_in_order: it serves, trains or asks a model, and makes a `system.signals.Shutdown`; the
            signals that its parent has blocked stay blocked until then.
        writes_models: its files are for others too. Those of any other command may hold prompts and
            answers, and are this user's alone.
    """

    name: str
    task: str
    summary: str
    arguments: str
    script: str | None = None
    details: str = ""
    ends_in_order: bool = False
    writes_models: bool = False

    def parser(self, prog: str) -> tuple[ArgumentParser, Callable[[Namespace], int]]:
        """Return the parser of this command and what carries it out."""
        description = f"{self.summary} {self.details}".strip()
        parser = CommandParser(prog, description=description, allow_abbrev=False)
        parser.add_argument("--version", action="version", version=f"mlx-parallm {__version__}")
        return parser, imported(self.arguments).added_to(parser)


class CommandParser(ArgumentParser):
    """A parser that names the flag or the action that was probably meant."""

    def error(self, message: str) -> NoReturn:
        super().error(message + self._hint(message))

    def _hint(self, message: str) -> str:
        word, names = "", list[str]()
        if wrong := re.search(r"unrecognized arguments: .*?(--[\w-]+)", message):
            word, names = wrong[1], self._flags()
        elif wrong := re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message):
            word, names = wrong[1], re.findall(r"'?([^', ]+)'?", wrong[2])
        near = get_close_matches(word, names, n=1)
        return f"; did you mean {near[0]!r}?" if near else ""

    def _flags(self) -> list[str]:
        """The flags of a parser and of its actions' parsers."""
        flags = [flag for action in self._actions for flag in action.option_strings]
        inner = [action.choices for action in self._actions if isinstance(action.choices, dict)]
        parsers = [each for choices in inner for each in choices.values()]
        return [*flags, *(flag for each in parsers for flag in each._flags())]


@dataclass(frozen=True)
class Leaf:
    """A part beside the core. Each hook is "module:name"; None = the leaf has none.
    docs/extending.md has an example.

    Attributes:
        name: the name of its section too.
        section: its class of settings, a `Section`; read as `config.section(ThatClass)`.
        check: (configuration) → None; raises ValueError if the section does not fit the rest.
        source: (SourceContext) → `RolloutSource`, or None if the configuration asks for none.
        routes: (its section, ServerDeps) → `AddedRouter` or None. If the process trains, a
            source of the same leaf brings the routes instead.
        part: (Config) → `daemon.ServedPart` or None: what works with the model of `mlx_parallm
            serve` itself.
        page: a `daemon.Page`: the routes that show runs in a browser.
        clients_train: the key of its section that is true where clients train, and the
            configuration does not. `mlx_parallm serve --NAME` sets it.
        serve_help: the help of that flag.
        images: (its section, directory of the model, its config.json) →
            `models.loaded_images.ImageSupport` or None: what reads images for that model.
        companion: (factory.CompanionContext) → `step.companion.StepCompanion`, or None if the
            configuration asks for none: what travels with the sequences of a step.
        environments: kinds of environments, each the "module:name" of its class, a
            `BaseEnvironment` or an `EnvironmentSource`.
        commands: further commands of `mlx_parallm`.
    """

    name: str
    section: str | None = None
    check: str | None = None
    source: str | None = None
    routes: str | None = None
    part: str | None = None
    page: str | None = None
    clients_train: str | None = None
    serve_help: str | None = None
    images: str | None = None
    companion: str | None = None
    environments: Mapping[str, str] = field(default_factory=dict)
    commands: tuple[Command, ...] = ()


@cache
def leaves() -> tuple[Leaf, ...]:
    """Return the leaves whose folders are there."""
    return tuple(import_module(name).LEAF for name in LEAVES if is_installed(name))


def imported(reference: str) -> Any:
    """Import the object that "module:name" names."""
    module, _, name = reference.partition(":")
    return getattr(import_module(module), name)


def client_trainer(sections: Mapping[str, Any]) -> Leaf | None:
    """Return the leaf whose clients train, by a configuration as a mapping; None: the
    configuration trains."""
    return next(
        (
            leaf
            for leaf in leaves()
            if leaf.clients_train and sections.get(leaf.name, {}).get(leaf.clients_train)
        ),
        None,
    )
