"""Ollama: the Modelfile, the chat template in Go's language, and the HTTP API.

The model is uploaded merged and already quantised: Ollama refuses adapters since 0.34.1, and
quantises nothing that it imports. Ollama stops at the tokens that the file names, and at every
`stop` of its parameters: both are set. API: https://docs.ollama.com/api
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from mlx_parallm.deploy.export.texts import CHATS
from mlx_parallm.errors import EndpointError, RequestError
from mlx_parallm.models.tokenizer import Tokenizer
from mlx_parallm.system.files import sha256_of
from mlx_parallm.system.foreign_http import json_of, sync_client
from mlx_parallm.system.foreign_json import read_json

DEFAULT_URL = "http://127.0.0.1:11434"
ROLES = ("system", "user", "assistant")
TRIES = 4
PAUSE_S = 1.0
PIECE_BYTES = 1 << 20
TIMEOUT_S = 600.0

Progress = Callable[[str], None]


def go_template(tokenizer: Tokenizer) -> str | None:
    """Return the chat template in Go's language, for one that puts fixed text around each message;
    else None.

    A template that takes tools is left to Ollama, which knows those of published models.
    """
    if not tokenizer.has_chat_template or tokenizer.template_takes_tools:
        return None
    try:
        around, opening = _around(tokenizer)
        exact = all(_joined(chat, around) + opening == _rendered(tokenizer, chat) for chat in CHATS)
    # it refuses one of the conversations, or does more than put text around them
    except (RequestError, ValueError):
        return None
    if not exact:
        return None
    branches = "{{ else ".join(
        f'if eq .Role "{role}" }}}}{_literal(before)}{{{{ .Content }}}}{_literal(after)}'
        for role, (before, after) in around.items()
    )
    return f"{{{{- range .Messages }}}}{{{{ {branches}{{{{ end }}}}{{{{ end }}}}{_literal(opening)}"


def modelfile(
    file: str,
    stops: Sequence[str],
    template: str | None,
    parameters: Mapping[str, float],
    system: str | None = None,
) -> str:
    """Return the text of a Modelfile."""
    lines = [f"FROM ./{file}"]
    if template is not None:
        lines.append(f'TEMPLATE """{template}"""')
    if system is not None:
        lines.append(f'SYSTEM """{system}"""')
    lines += [f"PARAMETER stop {json.dumps(stop, ensure_ascii=False)}" for stop in stops]
    lines += [f"PARAMETER {name} {value:g}" for name, value in parameters.items()]
    return "\n".join(lines) + "\n"


class OllamaDeployer:
    """An Ollama server. Its methods raise EndpointError, one line."""

    def __init__(self, url: str = DEFAULT_URL, *, pause_s: float = PAUSE_S) -> None:
        if not url.startswith(("http://", "https://")):
            raise EndpointError(f"{url!r} is not a URL: expected e.g. {DEFAULT_URL}")
        self.url, self._pause_s = url.rstrip("/"), pause_s
        self._http = sync_client(base_url=self.url, timeout=TIMEOUT_S)

    def version(self) -> str:
        return str(self._json("GET", "/api/version").get("version", ""))

    def models(self) -> list[str]:
        return [str(entry["name"]) for entry in self._json("GET", "/api/tags").get("models", [])]

    def delete(self, name: str) -> None:
        self._json("DELETE", "/api/delete", {"model": name})

    def create(
        self,
        name: str,
        file: Path,
        *,
        stops: Sequence[str],
        template: str | None = None,
        parameters: Mapping[str, float] | None = None,
        system: str | None = None,
        progress: Progress = lambda line: None,
    ) -> None:
        """Upload a GGUF file, and make a model of it under `name`; one of that name is replaced."""
        digest = self.upload(file, progress)
        body: dict[str, Any] = {"model": name, "files": {file.name: digest}, "stream": True}
        body["parameters"] = {"stop": list(stops), **(parameters or {})}
        body |= {"template": template} if template is not None else {}
        body |= {"system": system} if system is not None else {}
        try:
            with self._http.stream("POST", "/api/create", json=body) as reply:
                if reply.status_code != httpx.codes.OK:
                    raise self._refused("/api/create", reply.status_code, reply.read())
                status = self._follow(reply.iter_lines(), progress)
        except httpx.HTTPError as error:
            raise self._lost("/api/create", error) from error
        if status != "success":
            raise EndpointError(f"{self.url}/api/create ended with {status!r}, not with success")

    def upload(self, file: Path, progress: Progress = lambda line: None) -> str:
        """Return the digest of a file that the server has now. A cut upload is repeated, from
        its start."""
        digest = f"sha256:{sha256_of(file)}"
        path = f"/api/blobs/{digest}"
        for attempt in range(TRIES):
            try:
                if self._http.head(path).status_code == httpx.codes.OK:
                    return digest
                progress(f"uploading {file.name}, {file.stat().st_size:,} bytes")
                headers = {"Content-Length": str(file.stat().st_size)}
                reply = self._http.post(path, content=_pieces(file), headers=headers)
            except httpx.TransportError as error:
                if attempt == TRIES - 1:
                    raise self._lost(path, error) from error
                progress(f"the upload was cut ({error or type(error).__name__}); again")
                # another machine: nothing says when it is back
                time.sleep(self._pause_s * 2**attempt)
                continue
            if reply.status_code not in (httpx.codes.OK, httpx.codes.CREATED):
                raise self._refused(path, reply.status_code, reply.content)
        raise EndpointError(
            f"{self.url} took {file.name} {TRIES} times, and does not have it: is its disk full?"
        )

    def close(self) -> None:
        self._http.close()

    def _follow(self, lines: Iterator[str], progress: Progress) -> str:
        """Return the last status of a stream of JSON lines."""
        status = ""
        for line in lines:
            try:
                event = read_json(line) if line.strip() else {}
            except ValueError as error:
                raise EndpointError(
                    f"{self.url}/api/create answers {line[:80]!r}, which is not JSON"
                ) from error
            if "error" in event:
                raise EndpointError(f"Ollama refuses the model: {_one_line(event['error'])}")
            if event.get("status") and event["status"] != status:
                status = str(event["status"])
                progress(status)
        return status

    def _json(
        self, method: str, path: str, body: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        try:
            reply = self._http.request(method, path, json=body)
        except httpx.HTTPError as error:
            raise self._lost(path, error) from error
        if reply.status_code != httpx.codes.OK:
            raise self._refused(path, reply.status_code, reply.content)
        try:
            return dict(json_of(reply)) if reply.content else {}
        except (ValueError, TypeError) as error:
            raise EndpointError(f"{self.url}{path} answers no JSON: is it Ollama?") from error

    def _refused(self, path: str, status: int, content: bytes) -> EndpointError:
        try:
            reason = read_json(content)["error"]
        except (ValueError, KeyError, TypeError):
            reason = content[:800].decode(errors="replace")[:200]
        return EndpointError(
            f"Ollama at {self.url} answers {status} to {path}: {_one_line(reason)}", status=status
        )

    def _lost(self, path: str, error: httpx.HTTPError) -> EndpointError:
        return EndpointError(
            f"no answer from Ollama at {self.url}{path}:"
            f" {_one_line(str(error) or type(error).__name__)}; is `ollama"
            " serve` running?"
        )


def _around(tokenizer: Tokenizer) -> tuple[dict[str, tuple[str, str]], str]:
    """Return the text before and after a message of each role, and the opening of an answer.
    Raises ValueError."""
    marks = {role: f"@@{role}@@" for role in ROLES}
    again = "@@again@@"
    whole = _split(
        _rendered(
            tokenizer,
            [
                *({"role": r, "content": marks[r]} for r in ROLES),
                {"role": "user", "content": again},
            ],
        ),
        [*marks.values(), again],
    )
    alone = _rendered(tokenizer, [{"role": "user", "content": again}])
    before_user, end = _split(alone, [again])
    closed = tokenizer.render_chat_text(
        [{"role": "user", "content": again}], add_generation_prompt=False
    )
    after_user = _split(closed, [again])[1]
    opening = end.removeprefix(after_user)
    bos = tokenizer.token_text(tokenizer.bos_token_id) if tokenizer.bos_token_id is not None else ""
    before_user = before_user.removeprefix(bos)  # Ollama puts it there by itself
    first, to_user, to_answer, to_again, last = whole
    around = {
        "system": (first.removeprefix(bos), _without(to_user, before_user)),
        "user": (before_user, after_user),
        "assistant": (to_answer.removeprefix(after_user), _without(to_again, before_user)),
    }
    if last != end:
        raise ValueError("the end depends on what came before")
    return around, opening


def _rendered(tokenizer: Tokenizer, chat: Sequence[Mapping[str, str]]) -> str:
    bos = tokenizer.token_text(tokenizer.bos_token_id) if tokenizer.bos_token_id is not None else ""
    return tokenizer.render_chat_text(chat).removeprefix(bos)


def _split(text: str, marks: Sequence[str]) -> list[str]:
    parts = []
    for mark in marks:
        before, separator, text = text.partition(mark)
        if not separator:
            raise ValueError(f"the template leaves {mark} out")
        parts.append(before)
    return [*parts, text]


def _without(text: str, end: str) -> str:
    if not text.endswith(end):
        raise ValueError("the text before a message depends on what came before")
    return text[: len(text) - len(end)]


def _joined(chat: Sequence[Mapping[str, str]], around: Mapping[str, tuple[str, str]]) -> str:
    return "".join(around[m["role"]][0] + m["content"] + around[m["role"]][1] for m in chat)


def _literal(text: str) -> str:
    return f"{{{{ {json.dumps(text, ensure_ascii=False)} }}}}" if text else ""


def _pieces(file: Path) -> Iterator[bytes]:
    with file.open("rb") as stream:
        while piece := stream.read(PIECE_BYTES):
            yield piece


def _one_line(text: Any) -> str:
    return " ".join(str(text).split())[:300]
