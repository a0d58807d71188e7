"""Requests made up from the OpenAPI document, right ones and wrong ones, against a real server
(schemathesis).

    .venv/bin/python -m tests.soak.fuzz_openapi --cases 2000
    .venv/bin/python -m tests.soak.fuzz_openapi --cases 2000 --prompt-policy    # its service instead

What must not happen: a response of 500, a status or a content type that the document does not name,
a body that is not of the declared shape. The model is the shipped tiny one with a short context and
a short time limit, so that a request for a thousand long answers ends in 504 and not after minutes.
Needs the extra `dev`.
"""

import argparse
import collections
import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import hypothesis
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.checks import CHECKS, load_all_checks
from schemathesis.core.failures import FailureGroup

import mlx_parallm  # the fast BLAS comes before MLX
from mlx_parallm.config.load import load_config
from mlx_parallm.daemon import Serving
from mlx_parallm.models.threads import mlx_thread
from mlx_parallm.rollout_store.store import RolloutStore
from mlx_parallm.server.app import AddedRouter
from mlx_parallm.system.log import configure_logging
from mlx_parallm.weights import SharedWeights

assert mlx_parallm.__version__

GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "response_format")
EMBEDDING = 8  # numbers that the small prompt policy reads
# Fields that would make nearly every request a wrong one.
DROPPED = (
    "stop",
    "stop_token_ids",
    "logit_bias",
    "stream_options",
    "structured_outputs",
    "allowed",
    "mutation",
    *GUIDED,
)
CHECKED = ("status_code_conformance", "content_type_conformance", "response_schema_conformance")


@dataclass
class Findings:
    """How often each status came, by route, and what was wrong."""

    cases: int = 0
    statuses: dict[str, collections.Counter[int]] = field(default_factory=dict)
    # kind → the first request that showed it
    problems: dict[str, str] = field(default_factory=dict)


@contextmanager
def tiny_server(
    *overrides: str, added: Callable[[Serving, RolloutStore], AddedRouter] | None = None
) -> Iterator[Serving]:
    """A whole server of the shipped model in this process. A script calls it within
    `mlx_thread`."""
    options = [
        "model.base_path=builtin:tiny",
        "server.port=0",
        "server.max_model_len=64",
        "server.request_timeout_s=2",
    ]
    with tempfile.TemporaryDirectory() as directory:
        serving = Serving(load_config(None, [*options, *overrides]))
        store = RolloutStore(Path(directory) / "rollouts.sqlite")
        try:
            serving.listen(routers=[added(serving, store)] if added else [])
            loaded = serving.load()
            serving.open(
                loaded, SharedWeights(loaded.model, keep_versions=1), adapters={}, main_adapter=None
            )
            yield serving
        finally:
            serving.close()
            store.close()


def atropos(serving: Serving, store: RolloutStore) -> AddedRouter:
    """The /atropos routes. Imported here: the server's own fuzz runs without them."""
    from mlx_parallm.faces.atropos.queue import AtroposQueue, AtroposSettings
    from mlx_parallm.faces.atropos.routes import create_atropos_router
    from mlx_parallm.faces.atropos.rows import AskedRows

    settings = AtroposSettings(
        8, 64, serving.vocab_size, "checkpoints", 1, 100, None, None, 1.0, "reject"
    )
    queue = AtroposQueue(store, settings, current_step=lambda: 0, policy_version=lambda: 0)
    return create_atropos_router(queue, AskedRows(queue, store.path.parent, seed=0))


@contextmanager
def policy_server() -> Iterator[str]:
    """The service of a small prompt policy in this process; yields its URL."""
    from mlx_parallm.systems.prompt_policy.app import PromptPolicyServer
    from mlx_parallm.systems.prompt_policy.config import PromptPolicyConfig

    sizes = [
        f"prompt_policy.ppo.input_dim={EMBEDDING}",
        "prompt_policy.ppo.hidden_dim=8",
        "server.port=0",
    ]
    least = ["prompt_policy.ppo.min_buffer_size=8", "prompt_policy.ppo.buffer_size=64"]
    with tempfile.TemporaryDirectory() as directory:
        config = load_config(None, [*sizes, *least, f'prompt_policy.checkpoint_dir="{directory}"'])
        server = PromptPolicyServer(
            config.section(PromptPolicyConfig), config.server, config.resolve_api_key()
        )
        server.start()
        try:
            yield server.url
        finally:
            server.close()


def fuzz(url: str, cases: int, prefix: str = "") -> Findings:
    """Send at least `cases` requests to the paths that begin with `prefix`, as many for each
    operation.

    Half of them are wrong on purpose; every run sends the same.
    """
    load_all_checks()
    checks = CHECKS.get_by_names(CHECKED)
    operations = [
        result.ok()
        for result in schemathesis.openapi.from_url(url + "/openapi.json").get_all_operations()
    ]
    operations = [operation for operation in operations if operation.path.startswith(prefix)]
    with_input = [operation for operation in operations if _takes_input(operation)]
    each = -(-cases // (2 * len(with_input) - 1))  # a path of one name has no wrong form
    findings = Findings()
    for operation in operations:
        wrong = [GenerationMode.NEGATIVE] if operation in with_input else []
        for mode in (GenerationMode.POSITIVE, *wrong):
            tame = mode == GenerationMode.POSITIVE
            strategy = operation.as_strategy(generation_mode=mode)
            _fuzz_one(operation.label, strategy, each, checks, findings, tame=tame)
        if "/resume" in {other.path for other in operations}:
            httpx.post(url + "/resume")  # a pause would make all that follows wait
    return findings


def _takes_input(operation: Any) -> bool:
    raw = operation.definition.raw
    return bool(raw.get("requestBody") or raw.get("parameters"))


def _tame(body: Any) -> None:
    """The schema knows neither the models' names nor the context: without this few requests
    would get as far as the model. Changes a body in place."""
    if not isinstance(body, dict):
        return
    small = {
        "max_tokens": 12,
        "max_completion_tokens": 12,
        "max_new_tokens": 12,
        "n": 3,
        "min_tokens": 1,
    }
    for key, value in list(body.items()):
        if key == "model":
            body[key] = "default"
        elif key in small and isinstance(value, int):
            body[key] = min(value, small[key])
        elif key in ("prompt", "input_ids", "token_ids", "tokens") and isinstance(value, list):
            body[key] = [
                entry % 200 if isinstance(entry, int) else entry for entry in value[:20]
            ] or [1]
        elif key in ("embedding", "state", "next_state") and isinstance(value, list):
            body[key] = [*value, *[0.5] * EMBEDDING][:EMBEDDING]
        elif key == "action" and isinstance(value, int):
            body[key] = value % 5
        elif key in DROPPED:
            del body[key]
        else:
            _tame(value)


def _fuzz_one(
    label: str, strategy: Any, examples: int, checks: Any, findings: Findings, *, tame: bool
) -> None:
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @hypothesis.given(case=strategy)
    def one(case: Any) -> None:
        if tame:
            _tame(case.body)
        # its schema is any object
        if tame and case.path == "/generate" and isinstance(case.body, dict):
            case.body.setdefault("prompt", {"prompt_token_ids": [1, 2]})
        response = case.call(timeout=60)
        findings.cases += 1
        findings.statuses.setdefault(label, collections.Counter())[response.status_code] += 1
        if response.status_code == 500:
            findings.problems.setdefault(
                f"{label}: 500 {response.text[:200]}", case.as_curl_command()[:600]
            )
        try:
            case.validate_response(response, checks=checks)
        except FailureGroup as group:
            for error in group.exceptions:
                kind = f"{label}: {response.status_code} {str(error)[:200]}"
                findings.problems.setdefault(
                    kind, f"{case.as_curl_command()[:600]} → {response.text[:200]}"
                )

    with contextlib.suppress(Unsatisfiable):  # any text is a name: there is no wrong one
        one()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--prompt-policy", action="store_true", help="the prompt policy's service")
    args = parser.parse_args()
    configure_logging(level="error")
    started = time.perf_counter()
    with mlx_thread(), contextlib.ExitStack() as stack:
        if args.prompt_policy:
            url = stack.enter_context(policy_server())
        else:
            url = stack.enter_context(tiny_server(added=atropos)).url
        findings = fuzz(url, args.cases)
    for route, counts in findings.statuses.items():
        print(
            f"{route:45}",
            "  ".join(f"{status}×{count}" for status, count in sorted(counts.items())),
        )
    seconds = time.perf_counter() - started
    print(f"{findings.cases} cases in {seconds:.0f} s, {len(findings.problems)} problems")
    for kind, example in findings.problems.items():
        print(f"- {kind}\n  {example}")
    raise SystemExit(bool(findings.problems))


if __name__ == "__main__":
    main()
