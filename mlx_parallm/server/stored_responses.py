"""Responses that `store` keeps, in memory: for `previous_response_id`, item references and GET.

Everything is kept as JSON text, so that the bound in bytes is one. An item is in the memory once,
however many responses of a conversation name it, but each of them counts it: what is kept is never
more than the bound.
"""

import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from mlx_parallm.errors import RefusedError, RequestError

Item = dict[str, Any]
_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "custom_tool_call": "ctc",
    "function_call_output": "fco",
    "custom_tool_call_output": "ctco",
}


def new_item_id(kind: str) -> str:
    return f"{_PREFIXES.get(kind, 'item')}_{uuid.uuid4().hex}"


@dataclass(frozen=True, slots=True)
class StoredItem:
    id: str
    json: str

    @classmethod
    def of(cls, item: Mapping[str, Any]) -> "StoredItem":
        """An item that has no id gets one."""
        item_id = item.get("id")
        if not isinstance(item_id, str):
            item_id = new_item_id(item.get("type") or "message")
        return cls(item_id, json.dumps({**item, "id": item_id}))

    def load(self) -> Item:
        item: Item = json.loads(self.json)
        return item


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """`input`: everything before the answer, earlier responses' items too. `output`: the
    answer's items."""

    json: str
    input: tuple[StoredItem, ...]
    output: tuple[StoredItem, ...]

    @property
    def items(self) -> tuple[StoredItem, ...]:
        return self.input + self.output

    @property
    def size(self) -> int:
        return len(self.json) + sum(len(item.json) for item in self.items)

    def load(self) -> dict[str, Any]:
        response: dict[str, Any] = json.loads(self.json)
        return response


class RunningResponse(Protocol):
    """A response that is being generated."""

    id: str

    def snapshot(self) -> dict[str, Any]:
        """The response as it is now."""


Name = tuple[str | None, str]
"""A client (`auth.client_of`), and the id of one of its responses."""


class ResponseStore:
    """The responses of all clients. The server's thread only. `max_bytes`: of all that is kept, as
    JSON; the oldest goes first, 0 = nothing is."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._size = 0
        self.kept: dict[Name, StoredResponse] = {}  # oldest first
        self.running: dict[Name, RunningResponse] = {}

    def of(self, client: str | None) -> "ClientResponses":
        """Return the responses of one client."""
        return ClientResponses(self, client)

    def add(self, name: Name, stored: StoredResponse) -> None:
        if stored.size > self.max_bytes:
            return
        self.kept[name] = stored
        self._size += stored.size
        while self._size > self.max_bytes:
            self.delete(next(iter(self.kept)))

    def delete(self, name: Name) -> None:
        self._size -= self.kept.pop(name).size


class ClientResponses:
    """The responses of one client: the only ones that its requests can name."""

    def __init__(self, store: ResponseStore, client: str | None) -> None:
        self._store, self._client = store, client

    @property
    def enabled(self) -> bool:
        return self._store.max_bytes > 0

    @contextmanager
    def holding(self, response: RunningResponse) -> Iterator[None]:
        """While it is generated."""
        self._store.running[self._client, response.id] = response
        try:
            yield
        finally:
            self._store.running.pop((self._client, response.id), None)

    def running(self, response_id: str) -> RunningResponse | None:
        return self._store.running.get((self._client, response_id))

    def add(self, response: Mapping[str, Any], before: Sequence[StoredItem]) -> None:
        """Keep a response that has ended; `before`: the items that it answers."""
        output = tuple(StoredItem.of(item) for item in response["output"])
        stored = StoredResponse(json.dumps(response), tuple(before), output)
        self._store.add((self._client, response["id"]), stored)

    def find(self, response_id: str) -> StoredResponse:
        """Raises RefusedError (404)."""
        stored = self._store.kept.get((self._client, response_id))
        if stored is None:
            raise RefusedError(self._missing("response", response_id), 404, "response_id")
        return stored

    def delete(self, response_id: str) -> None:
        """Raises RefusedError (404)."""
        self.find(response_id)
        self._store.delete((self._client, response_id))

    def conversation(self, response_id: str | None) -> tuple[StoredItem, ...]:
        """The items up to the end of this response; () for None. Raises RequestError: it is not
        kept."""
        if response_id is None:
            return ()
        kept = self._store.kept.get((self._client, response_id))
        if kept is None:
            param, code = "previous_response_id", "previous_response_not_found"
            raise RequestError(self._missing("response", response_id), param=param, code=code)
        return kept.items

    def resolve(self, items: Sequence[Item]) -> list[Item]:
        """A request's items, with those that `item_reference`s name. Raises RequestError: one is
        not kept, or is named twice (a short request could stand for any number of large items)."""
        wanted = {item.get("id"): n for n, item in enumerate(items) if _is_reference(item)}
        if not wanted:
            return list(items)
        kept_items = {
            item.id: item
            for (client, _), stored in self._store.kept.items()
            if client == self._client
            for item in stored.items
        }
        resolved = []
        for position, item in enumerate(items):
            if not _is_reference(item):
                resolved.append(item)
                continue
            item_id, param = item.get("id"), f"input.{position}.id"
            if not isinstance(item_id, str) or item_id not in kept_items:
                raise RequestError(
                    self._missing("item", item_id), param=param, code="item_not_found"
                )
            if wanted[item_id] != position:
                raise RequestError(f"{param}: item {item_id!r} is named twice", param=param)
            resolved.append(kept_items[item_id].load())
        return resolved

    def _missing(self, what: str, name: object) -> str:
        return (
            f"no {what} {name!r} is kept for this key: it was not stored, was deleted, or was the"
            " oldest of more than server.stored_responses_bytes ="
            f" {self._store.max_bytes}; send the whole conversation as 'input'"
        )


def _is_reference(item: Item) -> bool:
    """OpenAI lets a reference leave its type out."""
    return item.get("type") == "item_reference" or set(item) == {"id"}
