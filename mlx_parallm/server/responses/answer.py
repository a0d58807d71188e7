"""A chat's answer → a Response object, whole or as the events of its stream."""

import time
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from mlx_parallm.errors import ParallmError
from mlx_parallm.server.errors import error_body, status_of
from mlx_parallm.server.protocol.to_chat import ChatFields
from mlx_parallm.server.responses.body import SEALED_REASONING, ResponsesBody, ToolNames
from mlx_parallm.server.responses.output import COMPLETED, INCOMPLETE, Event, OutputItems
from mlx_parallm.server.stored_responses import ClientResponses, Item, StoredItem

CANCELLED, FAILED, IN_PROGRESS = "cancelled", "failed", "in_progress"
# by the chat's finish reason; of all others COMPLETED
_STATUSES = {"length": INCOMPLETE, "abort": CANCELLED}
# Fields of the chat's answer or choice:
_KEPT = (
    "policy_version",
    "weight_versions",
    "stop_reason",
    "processed_logprobs",
    "forced_tokens",
    "schema_error",
)
_FINAL = {COMPLETED: "response.completed", FAILED: "response.failed"}


class ResponseForm:
    """One answer in the words of the Responses API: an `AnswerForm`.

    Args:
        earlier, own: the items that it answers: of earlier responses, and of this request.
        store: keeps the response once it has ended, if the body says so.
    """

    def __init__(
        self,
        body: ResponsesBody,
        names: ToolNames,
        response_id: str,
        model: str,
        earlier: Sequence[StoredItem],
        new_items: Sequence[Item],
        store: ClientResponses,
    ) -> None:
        self.id = response_id
        self._body, self._earlier, self._new_items, self._store = body, earlier, new_items, store
        self._model, self._created = model, int(time.time())
        sealed = SEALED_REASONING in body.include
        self._output = OutputItems(names, as_summary=body.reasoning.summarises, sealed=sealed)
        self._status = IN_PROGRESS
        self._usage: dict[str, Any] | None = None
        self._more = ChatFields(_KEPT)
        self._sequence = 0

    def whole(self, answer: Mapping[str, Any]) -> dict[str, Any]:
        choice = answer["choices"][0]
        self._output.take(choice["message"], choice["logprobs"])
        self._take_end(answer, choice)
        self._output.finish(self._item_status)
        return self._ended()

    async def events(
        self, chunks: AsyncGenerator[dict[str, Any], None]
    ) -> AsyncGenerator[Event, None]:
        """The first chunk's failure is raised, because then the answer can have a status of its
        own."""
        with self._store.holding(self):
            async with aclosing(chunks):
                first = await anext(chunks, None)
                for kind in ("response.created", "response.in_progress"):
                    yield self._numbered({"type": kind, "response": self.snapshot()})
                try:
                    for event in self._take_chunk(first or {}):
                        yield event
                    async for chunk in chunks:
                        for event in self._take_chunk(chunk):
                            yield event
                except ParallmError as error:
                    yield self._failed(error)
                    return
            for event in self._output.finish(self._item_status):
                yield self._numbered(event)
            response = self._ended()
            yield self._numbered(
                {"type": _FINAL.get(self._status, "response.incomplete"), "response": response}
            )

    def error(self, error: Mapping[str, Any]) -> Event:
        fields = error["error"]
        event = {
            "type": "error",
            "code": fields["code"],
            "message": fields["message"],
            "param": fields["param"],
        }
        return self._numbered(event)

    def snapshot(self, error: Mapping[str, Any] | None = None) -> dict[str, Any]:
        body = self._body
        reasoning = {"effort": body.reasoning.effort, "summary": body.reasoning.summary}
        text = body.text.model_dump(by_alias=True, exclude_none=True)
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "completed_at": int(time.time()) if self._status == COMPLETED else None,
            "status": self._status,
            "background": False,
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"}
            if self._status == INCOMPLETE
            else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata,
            "model": self._model,
            "output": list(self._output.output),
            "parallel_tool_calls": body.parallel_tool_calls,
            "previous_response_id": body.previous_response_id,
            "prompt_cache_key": body.prompt_cache_key,
            "reasoning": reasoning,
            "safety_identifier": body.safety_identifier,
            "service_tier": "default",
            "store": body.store and self._store.enabled,
            "temperature": body.temperature,
            "text": {"format": {"type": "text"}} | text,
            "tool_choice": body.tool_choice or "auto",
            "tools": body.offered_tools,
            "top_logprobs": body.top_logprobs,
            "top_p": body.top_p,
            "truncation": "disabled",
            "usage": self._usage,
            "user": body.user,
            **self._more.taken,
        }

    def _take_chunk(self, chunk: Mapping[str, Any]) -> Iterator[Event]:
        for choice in chunk.get("choices") or ():
            yield from map(
                self._numbered, self._output.take(choice["delta"], choice.get("logprobs"))
            )
            self._more.take_ids(choice)
            if choice["finish_reason"] is not None:
                self._take_end(chunk, choice)
        self._more.take_ids(chunk)
        if chunk.get("usage"):
            self._usage = _usage(chunk["usage"])

    def _take_end(self, answer: Mapping[str, Any], choice: Mapping[str, Any]) -> None:
        """`answer`: the whole one, or a choice's last chunk."""
        self._status = _STATUSES.get(choice["finish_reason"], COMPLETED)
        self._more.take_end(answer, choice)
        if "message" in choice:
            self._more.take_ids(answer)
            self._more.take_ids(choice)
            self._usage = _usage(answer["usage"])

    @property
    def _item_status(self) -> str:
        return COMPLETED if self._status == COMPLETED else INCOMPLETE

    def _ended(self) -> dict[str, Any]:
        response = self.snapshot()
        if response["store"]:
            self._store.add(response, (*self._earlier, *map(StoredItem.of, self._new_items)))
        return response

    def _failed(self, error: ParallmError) -> Event:
        self._status = FAILED
        body = error_body(str(error), status_of(error))["error"]
        failure = {"code": body["code"], "message": body["message"]}
        return self._numbered({"type": _FINAL[FAILED], "response": self.snapshot(failure)})

    def _numbered(self, event: Event) -> Event:
        numbered = event | {"sequence_number": self._sequence}
        self._sequence += 1
        return numbered


def _usage(chat: Mapping[str, Any]) -> dict[str, Any]:
    cached = (chat.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    reasoning = (chat.get("completion_tokens_details") or {}).get("reasoning_tokens", 0)
    return {
        "input_tokens": chat["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": chat["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": reasoning},
        "total_tokens": chat["total_tokens"],
    }
