"""Writes SECURITY.md's table of bounds from the constants that hold them: `.venv/bin/python
scripts/generate_bounds.py`.

tests/docs/test_bounds.py fails while the page differs from what this makes of it.
"""

from collections.abc import Iterator
from pathlib import Path

from mlx_parallm.config.server import ServerConfig
from mlx_parallm.engine import grammar, validation
from mlx_parallm.engine.adapter_loader import LONGEST_NAME
from mlx_parallm.environments import row_images
from mlx_parallm.environments.task_folders import folder
from mlx_parallm.execution import mcp_connection, mcp_process, tool_results
from mlx_parallm.faces.tinker import routes as tinker
from mlx_parallm.models.gguf import header
from mlx_parallm.rl_training.run import running
from mlx_parallm.server import middleware
from mlx_parallm.server.connection_limits import CONNECTIONS_PER_REQUEST
from mlx_parallm.server.protocol import fields, openai
from mlx_parallm.system import foreign_http, foreign_json, patterns, signals
from mlx_parallm.systems.traces import schema
from mlx_parallm.systems.vision import pictures
from mlx_parallm.systems.vision.config import VisionConfig

TARGET = Path(__file__).resolve().parents[1] / "SECURITY.md"
BEGIN = "<!-- bounds: begin; written by scripts/generate_bounds.py -->\n"
END = "<!-- bounds: end -->\n"


def render(page: str) -> str:
    """Return the page with its table made anew."""
    before, _, rest = page.partition(BEGIN)
    rows = [f"| {what} | {most} |\n" for what, most in bounds()]
    table = "".join(("| what comes from outside | bound |\n", "|---|---|\n", *rows))
    return before + BEGIN + table + END + rest.partition(END)[2]


def bounds() -> Iterator[tuple[str, str]]:
    """Yield each bound in words."""
    server, vision = ServerConfig(), VisionConfig()
    answers, folders = foreign_http.Bounds(), folder
    slowest = middleware.SLOWEST_BYTES_PER_SECOND
    yield "a request's body, as it comes and unpacked", size(fields.MAX_BODY_BYTES)
    yield (
        "its `Content-Encoding`",
        f"{foreign_http.ACCEPTED}; others (zstd, br, two at once) are a 415",
    )
    yield (
        "bodies of Tinker's API",
        f"zstd alone, {size(tinker.MOST_DECOMPRESSED)} unpacked",
    )
    yield (
        "a body's time",
        f"{middleware.BODY_SECONDS:g} s without a byte; {size(slowest)} a second",
    )
    yield (
        "unfinished bodies together",
        f"{middleware.UNFINISHED_BODIES} × the largest; then 503",
    )
    yield (
        "JSON",
        f"{foreign_json.MAX_DEPTH} deep, {foreign_json.MAX_CONTAINERS:,} lists and objects",
    )
    yield (
        "connections",
        f"{CONNECTIONS_PER_REQUEST} × `server.max_concurrent_requests`, fewer where files are few",
    )
    yield (
        "one request",
        f"{openai.MAX_MESSAGES:,} messages, {openai.MAX_TOOLS:,} tools,"
        f" {validation.MAX_CHOICES:,} completions, {validation.MAX_STOPS} stop strings of"
        f" {validation.LONGEST_STOP} characters",
    )
    sizes = grammar.MAX_CHARACTERS
    yield (
        "grammars",
        f"{sizes['json_schema']:,} characters of a schema or list of choices, {sizes['regex']:,} of"
        f" a regular expression or grammar; a step of {grammar.SLOW_MASK_S:g} s ends the answer",
    )
    yield (
        "other regular expressions",
        f"{patterns.LONGEST_PATTERN:,} characters, {patterns.SEARCH_S:g} s a search,"
        f" {foreign_json.BACKTRACKS:,} steps back in a schema's",
    )
    yield (
        "checks against JSON schemas",
        f"{foreign_json.MOST_STEPS:,} steps, counted before the check; beyond"
        f" {foreign_json.EXPLAINED_STEPS:,} the place of a fault is not named",
    )
    yield (
        "logs of other programs",
        f"a line of {size(schema.LONGEST_LINE)}, {schema.DEEPEST} deep,"
        f" {schema.MOST_CONTAINERS:,} lists and objects",
    )
    yield (
        "pictures of clients",
        f"{size(vision.max_image_bytes)} (`vision.max_image_bytes`), {vision.max_pixels:,} pixels,"
        f" {vision.max_images} a request, {pictures.MOST_SCANS} scans, {pictures.MOST_STRETCHED}"
        f" times as long as wide; fetched ones {vision.timeout_s:g} s, without redirects",
    )
    yield "pictures of rows", size(row_images.LARGEST)
    yield (
        "adapters over HTTP",
        f"{server.max_loaded_adapters} (`server.max_loaded_adapters`), names of {LONGEST_NAME}"
        " characters; read one after another",
    )
    yield (
        "answers of other servers",
        f"{size(answers.body)} unpacked, {size(answers.event)} of a stream's event,"
        f" {answers.containers:,} lists and objects, {foreign_http.MOST_REDIRECTS} redirects within"
        " the same server",
    )
    yield (
        "MCP servers",
        f"{mcp_connection.CALL_TIMEOUT_S:g} s a call, a line of {size(mcp_process.LONGEST_LINE)},"
        f" {mcp_connection.MOST_TOOLS:,} tools, {tool_results.LARGEST_RESULT:,} characters of a"
        f" result, of which the policy reads {tool_results.LONGEST_RESULT:,}",
    )
    yield "task folders", f"{size(folders.LARGEST)} and {folders.MOST_FILES:,} files of a task"
    yield "GGUF headers", f"{header.MOST_ENTRIES:,} entries, names of {header.LONGEST_NAME:,}"
    yield (
        "the end after SIGTERM",
        f"`server.drain_timeout_s` ({server.drain_timeout_s:g} s) for requests, then"
        f" {signals.END_S:g} s; {running.END_S:g} s behind a training's last checkpoint",
    )


def size(count: int) -> str:
    return f"{count >> 20} MiB" if count >= 1 << 20 else f"{count >> 10} KiB"


if __name__ == "__main__":
    TARGET.write_text(render(TARGET.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"wrote {TARGET}")
