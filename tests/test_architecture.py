"""Holds the structure that docs/design.md describes, by reading the source (AST) and importing it
afresh.

A limit that makes code worse is the wrong limit: add the place to the exceptions below, by name and
with the reason.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from mlx_parallm.config.leaves import leaves
from tests.source_trees import ROOT, Source, report, sources, tell

# Imports go one way: a unit may import units of lower layers, and itself. A unit is a module or
# folder of the root, or one of a group (faces, systems, runs, deploy) where named here:
# "runs.dashboard" is one, the rest of runs another.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("types", "errors"),
    ("system", "faces", "systems"),
    ("execution",),
    ("config",),
    ("losses", "rewards", "models"),
    ("weights", "rollout_store"),
    ("run_files",),
    ("environments", "engine"),
    ("server",),
    ("inference",),
    ("rl_training",),
    ("faces.library",),
    ("faces.primitives",),
    ("distributed",),
    ("daemon",),
    ("runs", "deploy"),
    ("cli",),
    # The leaves: no core module imports or names one of them.
    (
        "faces.atropos",
        "faces.mcp_server",
        "faces.tinker",
        "rl_training.distillation",
        "environments.textarena",
        "environments.openenv",
        "environments.task_folders",
    ),
    ("systems.experts", "systems.traces", "systems.prompt_policy"),
    ("systems.orchestrator", "runs.dashboard", "deploy.export", "faces.trl"),
    ("systems.pipeline", "systems.vision", "systems.feedback"),
    ("__init__", "__main__"),
)
# Within a layer only these; all others are independent of their neighbours.
WITHIN_A_LAYER = {
    ("weights", "models"): "the adapter table holds models.lora's AdapterWeights",
    ("environments", "engine.client"): "environments generate through the engine's mlx-free face",
    ("losses", "models.logprobs"): "the one token-logprob function",
    ("rewards", "models.scoring"): "a trained reward model, loaded when a reward is made of it",
    ("losses", "models.sums"): "sums over a vocabulary that are exact on a CPU",
}
CORE_UNITS = {unit for layer in LAYERS[: LAYERS.index(("cli",)) + 1] for unit in layer}
BASE_UNITS = set(LAYERS[0])  # they may import each other

# "mlx_parallm/x.py": why a core module names a leaf, or has a string that equals the name of a
# leaf's section
NAMES_A_LEAF = {
    "mlx_parallm/config/leaves.py": "the one list of leaves",
    "mlx_parallm/system/packages.py": "the extras of pyproject.toml, by their names",
    "mlx_parallm/system/secret_forms.py": "the form of a key of Tinker's service",
    "mlx_parallm/system/moved_names.py": "promised names and where they lie",
}

MLX_FREE = (
    "cli",
    "config",
    "environments",
    "environments.textarena",
    "environments.openenv",
    "environments.task_folders",
    "errors",
    "engine.client",
    "engine.grammar",
    "engine.scheduling",
    "engine.sequence",
    "execution",
    "rewards",
    "rl_training.evaluation.comparison",
    "rl_training.evaluation.evaluate",
    "rl_training.evaluation.pass_at_k_and_intervals",
    "rollout_store",
    "run_files",
    "server",
    "system",
    "inference.openai",
    "inference.types",
    "faces.primitives.__init__",
    "faces.tinker.config",
    "faces.tinker.leaf",
    "faces.trl.config",
    "systems.feedback.config",
    "systems.feedback.leaf",
    "systems.feedback.signals",
    "systems.feedback.store",
    "systems.prompt_policy.config",
    "systems.prompt_policy.leaf",
    "systems.traces.config",
    "systems.traces.leaf",
    "systems.vision.config",
    "systems.vision.leaf",
    "types",
)
# they measure MLX: imported when their command runs
USES_MLX = ("cli.doctor_report", "cli.contracts", "cli.probes")

MAX_FILE_LINES = 800
MAX_FUNCTION_LINES = 100
LONG_FILES: dict[str, str] = {}  # "mlx_parallm/x.py": reason
LONG_FUNCTIONS: dict[str, str] = {}  # "mlx_parallm/x.py:Class.method": reason
BROAD_EXCEPTS: dict[str, str] = {  # "mlx_parallm/x.py:Class.method": which boundary it is
    "mlx_parallm/engine/prefix_disk/disk.py:DiskThread._main": "a thread outlives what fails in it",
    "mlx_parallm/engine/prefix_disk/disk.py:PrefixDisk._read": "what cannot be read is computed",
    "mlx_parallm/engine/prefix_disk/disk.py:PrefixDisk._write": "the engine does not wait for it",
    "mlx_parallm/systems/traces/following.py:_stretch": "it is raised again",
    "mlx_parallm/systems/traces/following.py:_async_stream": (
        "the consumer's error goes to the generator"
    ),
    "mlx_parallm/faces/trl/rollouts.py:RolloutCalls._call": "a user's function may raise"
    " asyncio's CancelledError: the groups that wait are told",
    "mlx_parallm/execution/tool_client.py:ToolClient._call_function": "a tool's failure is a"
    " result, which is read",
    "mlx_parallm/execution/user_code.py:on_own_thread.work": (
        "what a function raises is its call's result"
    ),
    "mlx_parallm/execution/tool_client.py:_on_a_thread.work": (
        "what a function raises is its call's result"
    ),
    "mlx_parallm/execution/mcp_connection.py:MCPConnection._hold": "whoever waits for a server's"
    " start is told why",
    "mlx_parallm/execution/mcp_connection.py:MCPConnection._start": "a start that failed is let"
    " go, whatever it was",
    "mlx_parallm/execution/mcp_connection.py:MCPConnection.call": "a server may answer anything;"
    " it is a result",
    "mlx_parallm/engine/scoring.py:ScoreQueue.advance": (
        "a text is scored alone: what fails is its own"
    ),
    "mlx_parallm/engine/engine.py:Engine.recover": "who fails alone is told so; the others continue",
    "mlx_parallm/engine/live_requests.py:own_failure": "one request's text must not end the engine",
    "mlx_parallm/engine/thread.py:EngineThread._accept": (
        "one request's values must not end the engine"
    ),
    "mlx_parallm/engine/thread.py:EngineThread._main": "the thread's end"
    " must be told to whoever waits",
    "mlx_parallm/engine/thread.py:EngineThread._step": "a failed forward"
    " ends its requests, not the engine",
    "mlx_parallm/engine/thread.py:_call": "a function run on the engine thread fails in its caller",
    "mlx_parallm/environments/runner.py:attempt": "a failed episode is a recorded result",
    "mlx_parallm/environments/scheduler.py:RolloutScheduler._run": "the thread's end is kept for"
    " health() and check()",
    "mlx_parallm/environments/step_thread.py:StepThread.run.job": (
        "what a step raises ends its episode"
    ),
    "mlx_parallm/models/threads.py:MLXThread.submit.run": (
        "what a thread's work raises is its caller's"
    ),
    "mlx_parallm/models/loading.py:load_tokenizer": "the tokenizers library raises plain Exception",
    "mlx_parallm/distributed/players.py:RankPlayer._read": (
        "a rank whose groups do not come must end the run"
    ),
    "mlx_parallm/distributed/players.py:RankRolloutWorker._read": (
        "the same: rank 0 would wait for its groups"
    ),
    "mlx_parallm/distributed/requests.py:RankEngine._write": "a message that cannot be sent must"
    " not be waited for",
    "mlx_parallm/distributed/requests.py:RankRequestWorker._run": "rank 0's client would wait for an"
    " answer for ever",
    "mlx_parallm/system/device/faults.py:DeviceFaults.watched": "whatever a thread raises may have a"
    " fault of the GPU behind it; it is raised again",
    "mlx_parallm/daemon.py:_ended": "what is closed after a fault of the GPU may fail of it too",
    "mlx_parallm/rl_training/train.py:TrainingRun.execute": "a fault of the GPU behind any error"
    " ends the run in words",
    "mlx_parallm/rl_training/run/running.py:RunningRun.run": "the same, once there are weights",
    "mlx_parallm/rl_training/run/running.py:RunningRun._after_fault": (
        "the checkpoints are there anyway"
    ),
    "mlx_parallm/rl_training/events.py:RunEvents.emit": "a subscriber that"
    " fails must not stop the training",
    "mlx_parallm/rl_training/monitor/display.py:attempt": (
        "a display that fails must not stop the training"
    ),
    "mlx_parallm/rl_training/monitor/trackers.py:Trackers._attempt": "a tracker that fails must"
    " not stop the training",
    "mlx_parallm/execution/tool_calls.py:read_region": "a model's malformed call makes mlx-lm's"
    " parsers raise anything",
    "mlx_parallm/server/middleware.py:RequestContextMiddleware.__call__": (
        "one HTTP request's bug stays its own"
    ),
    "mlx_parallm/execution/user_code.py:user_code": "a user's function may"
    " raise anything: one line names it",
    "mlx_parallm/server/sse.py:EventStream._send_all": "the headers are out:"
    " the stream says what happened",
    "scripts/clients/programs/cells.py:cell.run": "whatever a client raises is the finding",
    "mlx_parallm/models/published/reader.py:Published.is_usual": "the same, of a config.json with"
    " one key less",
    "mlx_parallm/models/published/reader.py:read_published": "transformers' configuration classes"
    " raise anything",
    "scripts/parity/compare.py:compare_all": "whatever a user would see as a traceback is the finding",
    "mlx_parallm/models/published/report.py:_theirs": "any of transformers' models may raise anything",
    "scripts/parity/make.py:make_all": "whatever transformers raises of an option is recorded",
    "scripts/generate_model_table.py:kernels_called": (
        "whatever an architecture raises is not a kernel"
    ),
    "scripts/generate_model_table.py:try_one": "whatever an architecture raises is the finding",
}
ENVIRONMENT_READERS = {
    "mlx_parallm/config/load.py": "secrets",
    "mlx_parallm/config/server.py": "the cache directory",
    "mlx_parallm/config/tools.py": "secrets of MCP servers",
    "mlx_parallm/system/redaction.py": "secrets, to hide them",
    "mlx_parallm/system/blas.py": "sets MKL's mode before MKL is used",
    "mlx_parallm/system/processes.py": "marks what a program started here starts",
    "mlx_parallm/system/heap.py": "leaves malloc to whoever has set it",
    "mlx_parallm/cli/command.py": "gives a process without a PATH one",
    "mlx_parallm/system/hardware.py": "the rank that a launcher gave this process",
    "mlx_parallm/system/device/traits.py": "a CPU that goes a GPU's way",
    "mlx_parallm/models/cpu/few_rows.py": "leaves products to the BLAS, for whoever compares",
    "mlx_parallm/cli/rank_launcher.py": "gives the ranks that it"
    " starts the variables of mlx.launch",
}


def unit_of(module: str) -> str:
    """Return "runs.dashboard" of "runs.dashboard.routes": the longest name in LAYERS; else the
    first part."""
    parts = module.split(".")
    pair = ".".join(parts[:2])
    return pair if any(pair in units for units in LAYERS) else parts[0]


def is_mlx_free(source: Source) -> bool:
    named = any(source.module == name or source.module.startswith(name + ".") for name in MLX_FREE)
    return named and source.module not in USES_MLX


def layer_violation(source: Source, imported: str) -> str | None:
    parts = imported.split(".")
    if parts[0] != "mlx_parallm" or len(parts) == 1:
        return None
    layer_of = {unit: number for number, units in enumerate(LAYERS) for unit in units}
    target = unit_of(".".join(parts[1:]))
    if target not in layer_of:  # `from mlx_parallm import __version__`
        return None
    here, there = layer_of[unit_of(source.module)], layer_of[target]
    if (
        there < here
        or target == unit_of(source.module)
        or {unit_of(source.module), target} <= BASE_UNITS
    ):
        return None
    dotted = ".".join(parts[1:])
    if any(
        u == unit_of(source.module) and (dotted + ".").startswith(name + ".")
        for u, name in WITHIN_A_LAYER
    ):
        return None
    return (
        f"{source.path} (layer {here}) imports {imported} (layer {there}): imports go down only;"
        " pass the object in, or move what both need to the lower layer (the map of docs/design.md)"
    )


# who may ask for the device's kind, or read what lies in models/cpu/: everybody else asks one of the
# questions of system/device/traits.py, or calls an operation
KNOWS_THE_DEVICE = {
    "mlx_parallm/system/device/traits.py": "the one place that asks MLX",
    "mlx_parallm/system/hardware.py": "whose memory it is",
    "mlx_parallm/cli/probes.py": "which operations are tried on which kind",
    "mlx_parallm/models/ops.py": "the door to the CPU's operations",
    "mlx_parallm/models/attention.py": "the door to the CPU's attention",
}
KINDS = {"on_cpu", "is_cpu", "gpu_like"}


def test_few_files_know_the_devices_kind() -> None:
    def asks(source: Source) -> bool:
        named = {n.id for n in source.nodes(ast.Name) if isinstance(n, ast.Name)}
        named |= {n.attr for n in source.nodes(ast.Attribute) if isinstance(n, ast.Attribute)}
        reads = any(name.startswith("mlx_parallm.models.cpu.") for name in source.imports)
        return reads or bool(named & {*KINDS, "default_device", "DeviceType"})

    at_home = "mlx_parallm/models/cpu/"
    asking = {s.path for s in sources("mlx_parallm") if asks(s)}
    asking = {path for path in asking if not path.startswith(at_home)}
    tell(
        asking - set(KNOWS_THE_DEVICE),
        "asks for the device's kind: let models/ops.py or system/device/traits.py answer",
    )
    assert set(KNOWS_THE_DEVICE) <= asking, "KNOWS_THE_DEVICE names files that ask no more: remove"


def test_every_unit_has_a_layer() -> None:
    units = {unit_of(source.module) for source in sources("mlx_parallm")}
    known = {unit for layer in LAYERS for unit in layer}
    assert units <= known, f"place these in LAYERS: {sorted(units - known)}"


def test_imports_go_one_way() -> None:
    found = [
        layer_violation(source, name)
        for source in sources("mlx_parallm")
        for name in source.imports
    ]
    report(violation for violation in found if violation)


def mutual_imports(imports: dict[str, Iterable[str]]) -> dict[tuple[str, str], list[str]]:
    """Return the neighbours that import each other, at every level of the package, and by what.

    Args:
        imports: module → every dotted name that it imports; both from "mlx_parallm" on.
    """
    arrows: dict[tuple[str, str], list[str]] = {}
    for module, names in imports.items():
        here = module.removesuffix(".__init__").split(".")
        for name in names:
            there = name.split(".")
            same = [one == other for one, other in zip(here, there, strict=False)]
            depth = (*same, False).index(False)
            if 0 < depth < min(len(here), len(there)):
                arrow = ".".join(here[: depth + 1]), ".".join(there[: depth + 1])
                arrows.setdefault(arrow, []).append(f"{module} imports {name}")
    return {
        (one, other): by + arrows[other, one]
        for (one, other), by in arrows.items()
        if one < other and (other, one) in arrows
    }


def test_no_two_folders_import_each_other() -> None:
    """Neither do a module and the folder beside it. What both need lies in a third place."""
    found = mutual_imports({f"mlx_parallm.{s.module}": s.imports for s in sources("mlx_parallm")})
    report(line for by in found.values() for line in by)


def test_the_rule_on_mutual_imports_itself() -> None:
    imports = {
        "mlx_parallm.a.x": ["mlx_parallm.b.y.Name", "mlx_parallm.a.z", "json"],
        "mlx_parallm.b.__init__": ["mlx_parallm.a.z.Other"],
        "mlx_parallm.b.y": ["mlx_parallm.__version__", "mlx_parallm.b"],
        "mlx_parallm.c": ["mlx_parallm.a.x"],
    }
    assert list(mutual_imports(imports)) == [("mlx_parallm.a", "mlx_parallm.b")]
    inside = {"mlx_parallm.p.a": ["mlx_parallm.p.b.N"], "mlx_parallm.p.b": ["mlx_parallm.p.a.M"]}
    assert list(mutual_imports(inside)) == [("mlx_parallm.p.a", "mlx_parallm.p.b")]


def leaf_names(source: Source) -> Iterator[str]:
    """Yield each import of a leaf in a core module, each string that holds the path of one, each
    section of a leaf that is an attribute (`config.traces`) or a string ("traces",
    "traces.directory"). Docstrings may name leaves."""
    paths = [
        f"mlx_parallm.{unit}" for layer in LAYERS[:-1] for unit in layer if unit not in CORE_UNITS
    ]
    sections = [leaf.name for leaf in leaves() if leaf.section is not None]

    def names_a_leaf(dotted: str) -> bool:
        return any(f"{dotted}.".startswith((f"{path}.", f"{path}:")) for path in paths)

    docstrings = {id(node.value) for node in source.nodes(ast.Expr)}
    yield from (name for name in source.imports if names_a_leaf(name))
    for node in source.nodes(ast.Attribute, ast.Constant):
        if isinstance(node, ast.Attribute) and node.attr in sections:
            yield f"{node.lineno}: .{node.attr}"
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in docstrings
        ):
            is_key = any(re.match(rf"{section}(\.\w|$)", node.value) for section in sections)
            if names_a_leaf(node.value) or is_key:
                yield f"{node.lineno}: {node.value!r}"


def test_no_core_module_imports_or_names_a_leaf() -> None:
    places = {
        s.path: list(leaf_names(s))
        for s in sources("mlx_parallm")
        if unit_of(s.module) in CORE_UNITS
    }
    named = {path: names for path, names in places.items() if names}
    tell(
        (
            f"{path}:{name}"
            for path, names in named.items()
            for name in names
            if path not in NAMES_A_LEAF
        ),
        "the core names a leaf, or the section of one (config.NAME): let the leaf bring it by a hook"
        " of its Leaf (docs/extending.md#a-whole-part); if it is something else, rename it, or add"
        " the file to NAMES_A_LEAF with a reason",
    )
    assert set(NAMES_A_LEAF) <= set(named), (
        "NAMES_A_LEAF names modules that name no leaf: remove them"
    )


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("from mlx_parallm.faces.tinker.part import TinkerPart", 1),
        ("def f():\n    import mlx_parallm.runs.dashboard.routes", 1),
        ("KIND = 'mlx_parallm.systems.orchestrator.environment:HybridEnvironment'", 1),
        ("from mlx_parallm.runs.rollouts import Answers", 0),
        ("config.traces.directory", 1),
        ("sections.get('tinker')", 1),
        ("flags = {'tinker.enabled': True}", 1),
        ("path = 'traces of an agent'", 0),
        ('"""mlx_parallm.faces.tinker is a leaf."""', 0),
    ],
)
def test_the_leaf_rule_itself(text: str, count: int) -> None:
    assert len(list(leaf_names(_source("mlx_parallm/daemon.py", text)))) == count


def test_mlx_free_files_name_no_mlx() -> None:
    found = [
        f"{source.path} imports {name}"
        for source in sources("mlx_parallm")
        if is_mlx_free(source)
        for name in source.imports
        # lazily
        if name.split(".")[0] in ("mlx", "mlx_lm", "transformers")
        and source.module not in ("system.hardware", "system.device.traits")
    ]
    tell(found, "this file is to load without MLX (MLX_FREE): import it in the function")


def test_mlx_free_modules_load_no_mlx() -> None:
    modules = [
        "mlx_parallm." + s.module.removesuffix(".__init__")
        for s in sources("mlx_parallm")
        if is_mlx_free(s)
    ]
    program = (
        "import importlib, sys\n"
        f"for name in {modules!r}:\n"
        "    importlib.import_module(name)\n"
        "    loaded = sorted({'mlx', 'mlx_lm', 'mlx.core'} & set(sys.modules))\n"
        "    assert not loaded, f'importing {name} loads {loaded}'\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert result.returncode == 0, result.stderr


def test_mlx_lm_is_imported_by_models_only() -> None:
    found = [
        f"{source.path} imports {name}: take it from models/mlx_lm_api.py"
        for source in sources("mlx_parallm")
        if unit_of(source.module) != "models"
        for name in source.imports
        if name.split(".")[0] == "mlx_lm"
    ]
    report(found)


def test_mlx_lms_trainer_is_not_imported() -> None:
    """It imports every tracker that is installed: half a second of every start
    (models/adapters/linear.py)."""
    tell(
        (
            s.path
            for s in sources("mlx_parallm")
            for name in s.imports
            if name.startswith("mlx_lm.tuner")
        ),
        "imports mlx_lm.tuner, and with it every tracker: take the layer of models/adapters/linear.py",
    )


# ------------------------------------------------------------ what comes from outside: one way in

FETCHERS = {"AsyncClient", "Client", "request", "stream"} | {
    "get", "post", "put", "patch", "delete", "head", "options",
}  # fmt: skip
OTHER_CLIENTS = ("urllib.request", "http.client", "requests", "aiohttp", "websocket")
PATTERN_CALLS = (
    {"compile", "search", "match", "fullmatch", "findall"} | {"finditer", "sub", "subn", "split"}
)  # fmt: skip
# "mlx_parallm/x.py:line's text": a pattern that is put together, of texts in the source alone
BUILT_PATTERNS = {
    "mlx_parallm/execution/action_grammar.py": "of names, escaped",
    "mlx_parallm/execution/call_formats.py": "of a format's table and of names, escaped",
    "mlx_parallm/execution/call_text.py": "of the marks of a format's table",
    "mlx_parallm/execution/tool_calls.py": "of names, escaped",
    "mlx_parallm/system/secret_forms.py": "of the table's own forms",
    "mlx_parallm/systems/prompt_policy/mutations.py": "of the word lists beside it",
    "mlx_parallm/systems/prompt_policy/classifier.py": "of the word lists beside it",
    "mlx_parallm/rl_training/monitor/readable.py": "of words, escaped",
    "mlx_parallm/system/patterns.py": "the way itself",
    "mlx_parallm/system/device/faults.py": "of the table's own texts",
    "mlx_parallm/models/adapters/peft.py": "of the names of PEFT's files",
    "mlx_parallm/systems/traces/privacy.py": "of the home's name, escaped",
}


def fetches_by_itself(source: Source) -> Iterator[str]:
    """Yield each use of an HTTP or WebSocket client beside `system/foreign_http.py`."""
    for name in source.imports:
        root = name.split(".")[0]
        if (
            any(f"{name}.".startswith(f"{other}.") for other in OTHER_CLIENTS)
            or (root == "websockets" and name.endswith((".connect", ".client")))
            or (root in ("httpx", "httpx2") and name.split(".")[-1] in FETCHERS)
        ):
            yield name
    for node in source.nodes(ast.Call):
        if (
            isinstance(node.func, ast.Attribute)
            and isinstance(node.func.value, ast.Name)
            and node.func.value.id in ("httpx", "httpx2")
            and node.func.attr in FETCHERS
        ):
            yield f"{node.lineno}: {ast.unparse(node.func)}"


def _stands_in_the_source(node: ast.AST) -> bool:
    """Whether a pattern is written there: a literal, a constant's name, an escaped text, or made
    of these."""
    if isinstance(node, ast.Constant):
        return True
    if isinstance(node, ast.Name):
        return node.id.isupper()
    if isinstance(node, ast.BinOp):
        return _stands_in_the_source(node.left) and _stands_in_the_source(node.right)
    if isinstance(node, ast.JoinedStr):
        return all(_stands_in_the_source(part) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return _stands_in_the_source(node.value)
    if isinstance(node, ast.BoolOp):
        return all(_stands_in_the_source(value) for value in node.values)
    return isinstance(node, ast.Call) and "re.escape" in ast.unparse(node)


def patterns_from_outside(source: Source) -> Iterator[str]:
    """Yield each pattern that `re` compiles and that is not written in the source; each import of
    `regex`."""
    yield from (name for name in source.imports if name.split(".")[0] == "regex")
    for node in source.nodes(ast.Call):
        if (
            isinstance(node.func, ast.Attribute)
            and isinstance(node.func.value, ast.Name)
            and node.func.value.id == "re"
            and node.func.attr in PATTERN_CALLS
            and not _stands_in_the_source(node.args[0])
        ):
            yield f"{node.lineno}: {ast.unparse(node)[:80]}"


def test_whatever_is_fetched_is_bounded() -> None:
    found = {s.path: list(fetches_by_itself(s)) for s in sources("mlx_parallm")}
    found.pop("mlx_parallm/system/foreign_http.py")
    assert {path: uses for path, uses in found.items() if uses} == {}, "use system/foreign_http.py"


def test_patterns_from_outside_end_in_time() -> None:
    found = {s.path: list(patterns_from_outside(s)) for s in sources("mlx_parallm")}
    wrong = {path: uses for path, uses in found.items() if uses and path not in BUILT_PATTERNS}
    assert wrong == {}, "use system/patterns.py"
    assert not [path for path in BUILT_PATTERNS if not found.get(path)], "remove these"


@pytest.mark.parametrize(
    ("text", "rule", "count"),
    [
        ("import httpx\nhttpx.get('x')", fetches_by_itself, 1),
        ("import httpx\ndef f(c: httpx.Client): c.get('x')", fetches_by_itself, 0),
        ("def f():\n    import httpx2\n    httpx2.AsyncClient()", fetches_by_itself, 1),
        ("from httpx import Client", fetches_by_itself, 1),
        ("from urllib.request import urlopen", fetches_by_itself, 1),
        ("from urllib.parse import quote", fetches_by_itself, 0),
        ("from websockets.asyncio.client import connect", fetches_by_itself, 1),
        ("import re\ndef f(x): re.compile(x)", patterns_from_outside, 1),
        ("import re\ndef f(x): re.search(rf'a{x}', '')", patterns_from_outside, 1),
        ("import re\ndef f(x): re.search(rf'{A}{re.escape(x)}', x)", patterns_from_outside, 0),
        ("import re\nre.compile('|'.join(map(re.escape, names)) or 'x')", patterns_from_outside, 0),
        ("import regex", patterns_from_outside, 1),
    ],
)
def test_the_rules_of_what_comes_from_outside(text: str, rule: Any, count: int) -> None:
    assert len(list(rule(_source("mlx_parallm/x.py", text)))) == count


def test_package_init_files_are_empty() -> None:
    faces = (
        "__init__",
        "cli",
        "faces.primitives",
        "systems.experts",
        "systems.orchestrator",
        "systems.pipeline",
        "systems.prompt_policy",
        "systems.traces",
    )  # imported from
    inits = [
        s
        for s in sources("mlx_parallm")
        if s.path.endswith("/__init__.py") and unit_of(s.module) not in faces
    ]
    assert inits
    tell((s.path for s in inits if s.text.strip()), "keep it empty: import from the module itself")


def test_files_are_short() -> None:
    lengths = {s.path: len(s.text.splitlines()) for s in sources("mlx_parallm", "scripts", "tests")}
    long = {path: n for path, n in lengths.items() if n > MAX_FILE_LINES}
    tell(
        (f"{path} ({n} lines)" for path, n in long.items() if path not in LONG_FILES),
        f"at most {MAX_FILE_LINES}: move a subject to a file of its name, or say why in LONG_FILES",
    )
    assert set(LONG_FILES) <= set(long), "LONG_FILES names files that are short enough: remove them"


def test_functions_are_short() -> None:
    lengths = {
        f"{s.path}:{name}": (node.end_lineno or node.lineno) - node.lineno + 1
        for s in sources("mlx_parallm", "scripts", "tests")
        for name, node in s.functions
    }
    long = {name: n for name, n in lengths.items() if n > MAX_FUNCTION_LINES}
    tell(
        (f"{name} ({n} lines)" for name, n in long.items() if name not in LONG_FUNCTIONS),
        f"at most {MAX_FUNCTION_LINES}: name a part of it, or say why in LONG_FUNCTIONS",
    )
    assert set(LONG_FUNCTIONS) <= set(long), (
        "LONG_FUNCTIONS names functions that are short enough: remove them"
    )


def test_no_global_statement() -> None:
    found = [
        f"{s.path}:{node.lineno}"
        for s in sources("mlx_parallm", "scripts")
        for node in s.nodes(ast.Global)
    ]
    tell(found, "no global: pass the value, or hold it in an object")


def _catches_broadly(node: ast.ExceptHandler | ast.Call) -> bool:
    if isinstance(node, ast.ExceptHandler):
        caught = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
    elif ast.unparse(node.func) in ("suppress", "contextlib.suppress"):
        caught = list(node.args)
    else:
        return False
    return any(c is None or ast.unparse(c) in ("Exception", "BaseException") for c in caught)


def broad_excepts(source: Source) -> set[str]:
    """Places "path:Class.method" that catch everything, each named by its innermost function."""
    candidates = source.nodes(ast.ExceptHandler, ast.Call)
    return {f"{source.path}:{source.owner(node)}" for node in candidates if _catches_broadly(node)}


def test_only_listed_boundaries_catch_everything() -> None:
    found: set[str] = set().union(*(broad_excepts(s) for s in sources("mlx_parallm", "scripts")))
    tell(
        found - set(BROAD_EXCEPTS),
        "name what is caught; only a boundary catches everything: add it to BROAD_EXCEPTS and say why",
    )
    assert set(BROAD_EXCEPTS) <= found, (
        "BROAD_EXCEPTS names places that catch nothing broadly: remove them"
    )


def test_environment_variables_are_read_in_few_places() -> None:
    found = {
        s.path
        for s in sources("mlx_parallm")
        for node in s.nodes(ast.Attribute)
        if node.attr in ("environ", "getenv", "putenv")
        and ast.unparse(node) in ("os.environ", "os.getenv", "os.putenv")
    }
    tell(
        found - set(ENVIRONMENT_READERS),
        "reads the environment: make it a key of the configuration, or say why in"
        " ENVIRONMENT_READERS",
    )


def _source(path: str, text: str) -> Source:
    return Source(path, text)


@pytest.mark.parametrize(
    ("path", "text", "wrong"),
    [
        ("mlx_parallm/types.py", "from mlx_parallm.engine import client", True),
        ("mlx_parallm/engine/engine.py", "from mlx_parallm.weights import SharedWeights", False),
        ("mlx_parallm/engine/engine.py", "def f():\n    import mlx_parallm.server.app", True),
        (
            "mlx_parallm/environments/base.py",
            "from mlx_parallm.engine.client import EngineClient",
            False,
        ),
        ("mlx_parallm/environments/base.py", "from mlx_parallm.engine.engine import Engine", True),
        ("mlx_parallm/engine/engine.py", "from ..daemon import run_training", True),
        ("mlx_parallm/cli/table.py", "from mlx_parallm import __version__", False),
    ],
)
def test_the_layer_rule_itself(path: str, text: str, wrong: bool) -> None:
    source = _source(path, text)
    assert any(layer_violation(source, name) for name in source.imports) is wrong


def test_the_broad_except_rule_itself() -> None:
    text = (
        "class A:\n  def f(self):\n    try:\n      pass\n    except (OSError, Exception):\n     "
        " pass\ndef g():\n    with contextlib.suppress(Exception):\n        pass\ndef h():\n"
        "    try:\n        pass\n    except OSError:\n        pass\n"
    )
    assert broad_excepts(_source("x.py", text)) == {"x.py:A.f", "x.py:g"}


def test_every_console_of_the_package_is_ours() -> None:
    found = [
        source.path
        for source in sources("mlx_parallm")
        if source.module != "system.terminal" and "rich.console.Console" in {*source.imports}
    ]
    assert not found, "take Console from mlx_parallm.system.terminal: it escapes what others wrote"
