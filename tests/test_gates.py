"""The gates of docs/design.md on size and names: tiny modules, class names, circles, defaults.

Each list below names the exceptions with their reasons. An entry that is no longer needed fails the
test: remove it.
"""

import ast
import contextlib
import io
import re
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import pytest

from tests.source_trees import PACKAGE, Source, report, sources, tell
from tests.test_architecture import unit_of

MAX_FILES_IN_A_FOLDER = 22
MAX_ROOT_MODULES = 6  # __init__ and __main__ included
MAX_ROOT_FOLDERS = 19  # a new part goes into one of them: faces, systems, runs, deploy have room
TINY_MODULE_LINES = 80

# A stay: a function with a parameter, or a class with a field, that is the whole configuration or
# [rl_training]; a room: a module with one. The configuration's own modules are not counted.
CONFIGURATIONS = {"Config", "CoreConfig", "RLTrainingConfig"}
MAX_STAYS, MAX_ROOMS = 38, 19  # fewer: give a consumer its options, or what holds them already

SHORTEST_PIECE = 14  # characters of a wrapped string

BEGINNINGS = ("Of ", "What ", "From ", "As ", "On ")
PARTICIPLES = {"found", "given", "told", "known", "own", "said", "asked", "had"}

PROMISED_TWICE = {"RewardConfig"}  # TRL's, and the specification's of the orchestrator

TINY_MODULES: dict[str, str] = {  # under 80 lines, one importer: why it is its own file
    "faces.trl.schedules": "transformers' schedules, apart from TRL's arguments",
    "rl_training.step.learning_rate": "the schedule of the rate is looked for by this name",
    "engine.scheduling.prefill_pace": "plain Python beside the engine, which computes",
    "engine.prefix_disk.opening": "reads the model's files and arrays, which the folder's rest does not",
    "engine.decoding.prompt_lookup": "plain Python beside the engine, which computes",
    "cli.model_report": "a report of doctor, beside doctor_report and contracts",
    "models.published.fp8": "a format of weights, beside the classes that read them",
    "models.layouts.forced_routing": "which experts a batch forces is apart from how its blocks are computed",
    "rollout_store.images": "a companion is a file",
    "engine.companions.makers": "the list of companions",
    "faces.atropos.routing": "a companion is a file",
    "runs.dashboard.images": "a companion is a file",
    "engine.companions.request_images": "checks know no MLX, which the companion itself needs",
    "engine.companions.routing": "a companion is a file",
    "rl_training.plan.companions": "the list of companions",
    "rl_training.plan.distillation": "a companion is a file",
    "rl_training.plan.routing": "a companion is a file",
    "rl_training.plan.images": "a companion is a file",
    "rl_training.group_fit": "what happens to a group of another model is looked for by this name",
    "server.api.adapters": "a family of routes is a file",
    "server.api.tokenize": "a family of routes is a file",
    "system.power": "imports the log, which the command's help does without",
    "systems.traces.config": "a leaf's section is a file, which the core loads without the leaf",
    "system.quiet": "loaded with the package, before any library",
}

VARIABLE_ATTRIBUTES: dict[
    str, str
] = {  # "module:function" with getattr(x, <expression>): neither grep nor mypy can follow it
    "rl_training.plan.preflight:value_of": "keys of a configuration class",
    "systems.traces.trace:Trace.to_dict": "the names of the flat form are a table",
    "config.leaves:imported": "hooks and commands are imported when they are called",
    "models.published.mend:text_arguments": "mlx-lm's modules name that class in three ways",
    "models.published.reader:Published.get": "keys of a configuration class",
    "distributed.ranks:_watched": "socket options that not every system has",
    "environments.state:BaseEnvironment.check_class": "which methods a user's class overrides",
    "environments.curriculum.levels:LevelsSource.task": "a level's task has all fields of the one that it was",
    "execution.sandbox.sandbox_launcher:call": "system calls and limits by name, from a table",
    "execution.sandbox.sandbox_launcher:set_limits": (
        "system calls and limits by name, from a table"
    ),
    "execution.user_code:reference_to": "an object of the user's program, by its name",
    "execution.user_code:load": "a function that the configuration names",
    "faces.trl.environments:methods": "the methods of an environment of the user's are tools",
    "models.adapters.served:_Served.__getattr__": "a wrapper hands on what it does not know",
    "models.adapters.served:_Served.__setattr__": "a wrapper hands on what it does not know",
    "models.cpu.layers:FastMLP.__init__": "the layers of an mlx-lm"
    " module, by the names that it has",
    "models.recurrent.layers:_replace": "a method of an mlx-lm class, by its name",
    "models.layer_stack:_Stand.__getattr__": "a wrapper hands on what it does not know",
    "models.loading:_dtype": "a dtype by the name in the configuration",
    "faces.library.backprop:optimizer_keys": "an optimizer of mlx.optimizers, whatever it has",
    "server.metrics:_EngineCollector.collect": "the engine's counters, by their names in a table",
    "systems.traces.collector:AgentHook.restore": "the agent's methods,"
    " by the names that it gives them",
    "systems.traces.collector:AgentHook.wrap": "the agent's methods,"
    " by the names that it gives them",
    "systems.traces.following:_Other.__getattr__": "a wrapper hands on what it does not know",
    "systems.traces.collector:_method": "the agent's methods, by the names that it gives them",
    "faces.trl.attributes:TrainerAttributes.__getattr__": "an argument of the trainer by its name,"
    " as TRL has them",
    "faces.trl.callbacks:Callbacks.add_callback": "a callback has the methods that it wants",
    "faces.trl.callbacks:Callbacks.call": "a callback has the methods that it wants",
    "system.moved_names:lazy_names.get": "names are imported when they are asked for",
    "system.blas:share_blas_between": "a BLAS's own function that sets its threads",
}

# values that change nothing, and names that every function with a time-out or a random state has
NEUTRAL = {
    "seed",
    "temperature",
    "timeout_s",
    "top_k",  # a sampler's is another number than a teacher's
    "top_p",
}
TRLS = "faces.trl.config"  # its fields are TRL's arguments, not keys
# "module.function.parameter" or "module.Class.field": why it has a default beside the
# configuration's
SECOND_DEFAULTS: dict[str, str] = {
    "cli.distill.DistillData.max_tokens": "of the teacher, not of the policy",
    "cli.start.Train.restarts": "of the training; tool servers' are another",
    "systems.pipeline.command.Pipeline.problems": "0 would be no verdict",
    "systems.traces.command.Record.port": "of the recorder, which has no configuration",
    "engine.sequence.Sequence.rank": "its place among n completions; LoRA's rank is another",
    "environments.kinds.conversation.__init__.max_tokens": (
        "of the simulated user, not of the policy"
    ),
    "environments.manager.RolloutConfig.group_size": "docs/stability.md promises this constructor",
    "environments.manager.RolloutConfig.max_tokens": "docs/stability.md promises this constructor",
    "losses.types.LossInputs.kl_beta": "docs/stability.md promises this constructor; 0 = no KL",
    "models.lora.adapter_config.dropout": "0 = none",
    "models.lora.save_adapter.dropout": "0 = none",
    "faces.tinker.bodies.AdamBody.beta1": "Adam's, the SDK's own default; AdaLoRA's is another",
    "faces.tinker.bodies.AdamBody.beta2": "Adam's, the SDK's own default; AdaLoRA's is another",
    "faces.tinker.bodies.AdamBody.learning_rate": "the SDK's own default,"
    " for a field that it always sends",
    "faces.tinker.bodies.AdamBody.weight_decay": "the SDK's own default,"
    " for a field that it always sends",
    "faces.tinker.bodies.LoraBody.rank": "the SDK's own default, where"
    " a client sends no lora_config",
    "rewards.judge.judge.max_tokens": "of the judge, not of the policy",
}

# Configuration classes of leaves: their keys are their own, whatever they are called.
OWN_CONFIGURATIONS = (
    "systems.experts.expert.ExpertConfig.",
    "systems.experts.recurrent_ppo.RecurrentPPOConfig.",
)


@cache
def modules() -> dict[str, Source]:
    return {source.module.removesuffix(".__init__"): source for source in sources("mlx_parallm")}


@cache
def edges() -> dict[str, set[str]]:
    """Which modules of the package each one imports, anywhere in the file."""

    def module_of(dotted: str) -> str:
        parts = dotted.split(".")[1:]
        while parts and ".".join(parts) not in modules():
            parts = parts[:-1]
        return ".".join(parts)

    return {
        name: {module_of(i) for i in source.imports if i.startswith("mlx_parallm.")} - {name, ""}
        for name, source in modules().items()
    }


def test_folders_can_be_taken_in_at_a_glance() -> None:
    folders = Counter(
        Path(s.path).parent for s in sources("mlx_parallm") if not s.path.endswith("__init__.py")
    )
    tell(
        (f"{f} ({n} files)" for f, n in folders.items() if n > MAX_FILES_IN_A_FOLDER),
        f"at most {MAX_FILES_IN_A_FOLDER} files: put those of one subject into a folder of its name",
    )
    modules_here, folders_here = (len(list(PACKAGE.glob(p))) for p in ("*.py", "[a-z]*/"))
    if modules_here > MAX_ROOT_MODULES or folders_here > MAX_ROOT_FOLDERS:
        tell([PACKAGE.name], "too many names at the top: put the new one into one of its folders")


def test_a_tiny_module_with_one_importer_has_a_reason() -> None:
    importers = defaultdict(set)
    for module, imported in edges().items():
        for target in imported:
            importers[target].add(module)
    tiny = {
        name
        for name, source in modules().items()
        if source.text.count("\n") < TINY_MODULE_LINES
        and len(importers[name]) == 1
        and not source.path.endswith("__init__.py")
    }
    assert tiny - set(TINY_MODULES) == set(), (
        "merge these into their importer, or say why not in TINY_MODULES"
    )
    assert set(TINY_MODULES) <= tiny, "TINY_MODULES names modules that need no reason: remove them"


def stays(source: Source) -> Iterator[str]:
    """Yield the functions and fields of a module that hold or pass the configuration on."""

    def passes(annotation: ast.expr | None) -> bool:
        names = re.findall(r"[\w.]+", ast.unparse(annotation)) if annotation is not None else ()
        return not CONFIGURATIONS.isdisjoint(names)

    imported = {
        alias.name
        for node in source.nodes(ast.ImportFrom)
        if "mlx_parallm.config" in (node.module or "")
        for alias in node.names
    }
    if not imported & CONFIGURATIONS:
        return
    for node in source.nodes(ast.AnnAssign):
        if passes(node.annotation):
            yield ast.unparse(node.target)
    for name, function in source.functions:
        a = function.args
        if any(passes(each.annotation) for each in (*a.posonlyargs, *a.args, *a.kwonlyargs)):
            yield name


def test_a_configuration_does_not_travel_further() -> None:
    rooms = {
        name: list(stays(source))
        for name, source in modules().items()
        if unit_of(source.module) != "config" and not name.endswith(".config")
    }
    holders = [name for name, held in rooms.items() if held]
    if sum(map(len, rooms.values())) > MAX_STAYS or len(holders) > MAX_ROOMS:
        tell(
            (f"{name}: {', '.join(rooms[name])}" for name in holders),
            f"more than {MAX_STAYS} functions in {MAX_ROOMS} modules take a whole configuration:"
            " pass the section, or the value, that the new one reads",
        )


def test_no_class_name_twice() -> None:
    where = defaultdict(list)
    for source in sources("mlx_parallm"):
        for node in source.nodes(ast.ClassDef):
            where[node.name].append(source.path)
    tell(
        (
            f"{name} of {' and '.join(paths)}"
            for name, paths in where.items()
            if len(paths) > 1 and name not in PROMISED_TWICE
        ),
        "one name, two things: give the newer one the name of what it holds",
    )


GATES = ("tests/test_architecture.py", "tests/test_gates.py", "tests/test_documented.py")


def test_every_gate_says_what_to_do() -> None:
    def is_silent(node: ast.Assert) -> bool:
        if node.msg is not None:
            return False
        if isinstance(node.test, ast.UnaryOp):
            return not isinstance(node.test.operand, ast.Call)
        others = node.test.comparators if isinstance(node.test, ast.Compare) else []
        return any(ast.unparse(other) in ("[]", "{}", "set()") for other in others)

    tell(
        (
            f"{source.path}:{node.lineno}"
            for source in sources("tests")
            if source.path in GATES
            for node in source.nodes(ast.Assert)
            if isinstance(node, ast.Assert) and is_silent(node)
        ),
        "a newcomer reads this failure first: use `tell(places, advice)` of tests/source_trees.py",
    )


def test_docstrings_begin_with_a_verb_or_a_noun() -> None:
    """A reader who comes from a search sees the first line alone."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    twisted = [
        f"{source.path}: {docstring.splitlines()[0]}"
        for source in sources("mlx_parallm")
        for node in source.nodes(*kinds)
        if (docstring := ast.get_docstring(node)) and docstring.startswith(BEGINNINGS)
    ]
    tell(twisted, "begin with a verb (Return, Hold, Pick) or the thing's noun (BEGINNINGS)")


BINDERS = (
    ast.Name,
    ast.Attribute,
    ast.FunctionDef,
    ast.AsyncFunctionDef,
    ast.ClassDef,
    ast.arg,
    ast.alias,
    ast.ExceptHandler,
)


def bound_names(node: ast.AST) -> Iterator[str]:
    """Yield the names that a node of the syntax tree binds."""
    match node:
        case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
            yield name
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            yield name
        case ast.arg(arg=name):
            yield name
        case ast.alias(name=name, asname=other):
            yield other or name
        case ast.ExceptHandler(name=str(name)):
            yield name


def test_names_say_what_they_hold() -> None:
    """A participle is not the name of a thing: `checkpoint`, `matches`, `requested_seed`."""
    report(
        f"{source.path}: {name!r} is not a name (PARTICIPLES of tests/test_gates.py):"
        " name the thing, `checkpoint` or `requested_seed`"
        for source in sources("mlx_parallm")
        for node in source.nodes(*BINDERS)
        for name in bound_names(node)
        if name in PARTICIPLES
    )


def test_lists_are_written_out() -> None:
    """`*("a", "b")` inside a list only hides its length from the formatter."""
    nested = [
        f"{source.path}:{value.lineno}"
        for source in sources("mlx_parallm")
        for node in source.nodes(ast.Starred, ast.Dict)
        for value in (
            [node.value]
            if isinstance(node, ast.Starred)
            else [v for k, v in zip(node.keys, node.values, strict=True) if k is None]
        )
        if isinstance(value, ast.Tuple | ast.List | ast.Dict)
    ]
    tell(nested, "write the elements into the list itself")


def wrapped_strings(source: Source) -> Iterator[list[tokenize.TokenInfo]]:
    """Yield the pieces of each string that is written as several, one below the other."""
    lines = source.text.splitlines(keepends=True)
    for node in source.nodes(ast.Constant, ast.JoinedStr):
        first, last = node.lineno - 1, node.end_lineno or node.lineno
        is_text = isinstance(node, ast.JoinedStr) or isinstance(node.value, str)
        if not is_text or last - first < 2 or '"""' in lines[first]:
            continue
        text = (
            "("
            + lines[first].encode()[node.col_offset :].decode()
            + "".join(lines[first + 1 : last])
        )
        with contextlib.suppress(tokenize.TokenError, IndentationError):
            pieces: list[tokenize.TokenInfo] = []
            for token in tokenize.generate_tokens(io.StringIO(text).readline):
                if token.type == tokenize.STRING:
                    pieces.append(token)
                elif pieces and token.type not in (tokenize.NL, tokenize.COMMENT):
                    break
            if len(pieces) > 1:
                yield pieces


def test_a_string_is_not_wrapped_after_a_word() -> None:
    """A piece of a word or two is what a formatter's change of width leaves behind."""
    report(
        f"{source.path}: {piece.string}: join it with its neighbours, at 100 columns"
        for source in sources("mlx_parallm", "scripts")
        for pieces in wrapped_strings(source)
        for piece in pieces
        if len(piece.string.lstrip("fF")) - 2 <= SHORTEST_PIECE
        and piece.string[0] in "\"'f"  # a pattern's pieces may be short
        and "\\n" not in piece.string
    )


def test_a_literal_stands_without_parentheses() -> None:
    """`("id")` alone is not a tuple."""
    lonely = re.compile(
        r"""(?:[\[,(=:{]|\breturn|\bin|\belse|\bif|\bor|\band|\+|==)\s*\(f?"[^"\\]*"\)"""
    )
    report(
        f"{source.path}: {match[0]}: without parentheses"
        for source in sources("mlx_parallm", "scripts", "tests")
        for match in lonely.finditer(source.text)
    )


def test_no_circle_between_files() -> None:
    TopologicalSorter(edges()).prepare()  # CycleError names the files of a circle


def variable_attributes(source: Source) -> set[str]:
    """Places "module:Class.method" that read or set an attribute whose name is not in the code."""
    return {
        f"{source.module}:{source.owner(node)}"
        for node in source.nodes(ast.Call)
        if isinstance(node.func, ast.Name)
        and node.func.id in ("getattr", "setattr")
        and not isinstance(node.args[1], ast.Constant)
    }


def test_attributes_are_named_in_the_code() -> None:
    found: set[str] = set().union(*(variable_attributes(s) for s in sources("mlx_parallm")))
    tell(
        found - set(VARIABLE_ATTRIBUTES),
        "the attribute's name is not in the code, so a search misses it: name it, or say why in"
        " VARIABLE_ATTRIBUTES",
    )
    assert set(VARIABLE_ATTRIBUTES) <= found, (
        "VARIABLE_ATTRIBUTES names places that are gone: remove them"
    )


def _number(node: ast.expr | None) -> float | None:
    try:
        value: Any = ast.literal_eval(node) if node is not None else None
    except ValueError:
        return None
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _field_default(node: ast.AnnAssign) -> float | None:
    """Return the numeric default of `name: T = 1` or `name: T = Field(1, …)`."""
    value = node.value
    if isinstance(value, ast.Call):
        by_name = [keyword.value for keyword in value.keywords if keyword.arg == "default"]
        value = (value.args or by_name or [None])[0]
    return _number(value)


def numeric_defaults(source: Source) -> Iterator[tuple[str, str]]:
    """Yield (name, place) of every parameter and every field of a class that has a numeric
    default."""
    for _, function in source.functions:
        a = function.args
        positional = [*a.posonlyargs, *a.args]
        defaults = list(
            zip(positional[len(positional) - len(a.defaults) :], a.defaults, strict=True)
        )
        for argument, default in defaults + list(zip(a.kwonlyargs, a.kw_defaults, strict=True)):
            if _number(default) is not None:
                yield argument.arg, f"{source.module}.{function.name}.{argument.arg}"
    for node in source.nodes(ast.ClassDef):
        for field in node.body:
            if isinstance(field, ast.AnnAssign) and _field_default(field) is not None:
                name = ast.unparse(field.target)
                yield name, f"{source.module}.{node.name}.{name}"


def numeric_keys(source: Source) -> Iterator[str]:
    """Yield the keys of configuration classes that are numbers, or numbers that a preset fills
    in."""
    for node in source.nodes(ast.ClassDef):
        fields = [field for field in node.body if isinstance(field, ast.AnnAssign)]
        yield from (
            ast.unparse(f.target)
            for f in fields
            if re.search(r"\b(int|float)\b", ast.unparse(f.annotation))
        )


def test_a_number_has_one_default_the_configurations() -> None:
    configuration = [
        s
        for s in sources("mlx_parallm")
        if unit_of(s.module) == "config" or s.module.endswith(".config")
    ]
    keys = {key for s in configuration if s.module != TRLS for key in numeric_keys(s)} - NEUTRAL
    assert {"clip_ratio", "buffer_size"} <= keys
    elsewhere = {
        place
        for source in sources("mlx_parallm")
        if source not in configuration
        for name, place in numeric_defaults(source)
        if name in keys and not place.startswith(OWN_CONFIGURATIONS)
    }
    report(
        f"{place}: a key of the configuration has this name and its default: pass the value, or say"
        " in SECOND_DEFAULTS of tests/test_gates.py why this is another (NEUTRAL:"
        " a value that changes nothing)"
        for place in sorted(elsewhere - set(SECOND_DEFAULTS))
    )
    assert set(SECOND_DEFAULTS) <= elsewhere, (
        "SECOND_DEFAULTS names defaults that are gone: remove them"
    )


def test_nothing_is_forked_and_no_stream_is_handed_over() -> None:
    """On macOS a fork after Objective-C began crashes, and a stream's context that ends on another
    thread raises; fused losses of mlx-lm race (docs/operations.md#a-mac). The sandbox's launcher
    forks, which loads no MLX."""
    calls = {("os", "fork"), ("multiprocessing", "Process"), ("mx", "stream"), ("mx", "new_stream")}
    report(
        f"{source.path}:{node.lineno}: {node.value.id}.{node.attr}"
        for source in sources("mlx_parallm")
        if not source.path.endswith("sandbox/sandbox_launcher.py")
        for node in source.nodes(ast.Attribute)
        if isinstance(node.value, ast.Name) and (node.value.id, node.attr) in calls
    )
    report(
        f"{source.path}:{node.lineno}: {node.module}"
        for source in sources("mlx_parallm")
        for node in source.nodes(ast.ImportFrom)
        if (node.module or "").startswith("mlx_lm.tuner.losses")
    )


STARTED_WITH = {"argv", "path", "stdin"}  # what a program is started with, which no thread waits by


def test_no_test_alters_the_standard_library() -> None:
    """It is the whole process's: the loop of a server that is shared by a run saw a test's clock,
    waited until its 1000 s, and the run failed at its end, on machines that had been up for
    less."""
    tell(
        (
            f"{source.path}:{node.lineno}: {ast.unparse(node.args[0])}"
            for source in sources("tests")
            for others in [imported_packages(source)]
            for node in source.nodes(ast.Call)
            if alters_a_library(node, others)
        ),
        'set the name in the one module instead: setattr(files, "os", Altered(os, fsync=fail)), of'
        " tests/altered.py; a clock is tests/clock.py's",
    )


def imported_packages(source: Source) -> set[str]:
    """Return the names that modules of other libraries have in a file: `signal` may be one of
    the package's."""
    return {
        alias.asname or alias.name
        for node in source.nodes(ast.ImportFrom)
        if (node.module or "").split(".")[0] not in sys.stdlib_module_names
        for alias in node.names
    }


def alters_a_library(call: ast.Call, others: Collection[str]) -> bool:
    """Return whether a call sets an attribute of a module of the standard library."""
    texts = [ast.unparse(argument) for argument in call.args]
    if not texts or not ast.unparse(call.func).endswith(("setattr", "patch", "patch.object")):
        return False
    if texts[0].startswith("'"):
        owner, name = texts[0].strip("'").rpartition(".")[::2]
    else:
        owner, name = texts[0], "".join(texts[1:2]).strip("'")
    last = owner.rpartition(".")[2]
    return last in sys.stdlib_module_names and owner not in others and name not in STARTED_WITH


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ('monkeypatch.setattr(time, "monotonic", clock)', True),
        ('monkeypatch.setattr(heartbeat.time, "time", clock)', True),
        ('monkeypatch.setattr("mlx_parallm.recorder.os.write", half)', True),
        ('monkeypatch.setattr("shutil.disk_usage", full)', True),
        ('mock.patch.object(asyncio, "sleep")', True),
        ('monkeypatch.setattr(heartbeat, "time", clock)', False),
        ('monkeypatch.setattr(middleware, "asyncio", clock)', False),
        ('monkeypatch.setattr(signal, "PAUSE_S", 0.01)', False),
        ('monkeypatch.setattr(sys, "path", [])', False),
    ],
)
def test_the_rule_on_libraries_itself(text: str, wrong: bool) -> None:
    call = ast.parse(text, mode="eval").body
    assert isinstance(call, ast.Call)
    assert alters_a_library(call, {"signal"}) is wrong


TIMED = re.compile(r"assert [^\n]*\b(?:monotonic|perf_counter|time)\(\) - \w+ <")


def test_tests_assert_no_times() -> None:
    assert TIMED.search("assert time.monotonic() - started < 10"), "the rule itself"
    report(
        f"{source.path}: {match[0]}: a busy machine is later: wait for an event, count what was"
        " done, or take time.process_time()"
        for source in sources("tests")
        for match in TIMED.finditer(source.text)
        if "TIMED" not in source.text
    )
