"""10,000 changed protobuf bodies over HTTP: no 500, and the server still trains.

In half of them bytes are replaced, cut out or repeated; the others are protobuf with other fields.

.venv/bin/python -m scripts.tinker.fuzz [COUNT]
"""

import random
import sys
import tempfile
from collections import Counter
from pathlib import Path

import httpx
from google.protobuf.message import DecodeError

from mlx_parallm.faces.tinker import wire_pb2
from mlx_parallm.faces.tinker.wire import PROTOBUF, leading_number
from mlx_parallm.system.log import configure_logging
from tests.tinker.serving import API, WireClient, request_of, tinker_server

SEQ_ID_FIELD = 2
NUMBERS = (0.0, -1.0, 0.5, 1e308, float("inf"), float("nan"))
INTEGERS = (0, 1, 2, 3, 4, 7, 1 << 20, (1 << 31) - 1)
ENTRY = {
    "tokens": [1, 2, 3],
    "target_tokens": [2, 3, 4],
    "weights": [0.5, -1.0, 0.0],
    "spans": [("", 0, 2), ("x-1", 4, 1)],
}


def changed(rng, body, head):
    """Some bytes replaced, cut out or repeated; in half of all bodies none of the `head` first
    ones."""
    body, start = bytearray(body), rng.choice((0, head))
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        if start >= len(body):
            break
        at, kind = rng.randrange(start, len(body)), rng.choice((0, 0, 1, 2))
        if kind == 0:
            body[at] = rng.randrange(256)
        elif kind == 1:
            del body[at : at + rng.randint(1, 9)]
        else:
            body[at:at] = body[at : at + rng.randint(1, 9)]
    return bytes(body)


def with_other_fields(rng, body):
    """Still protobuf, with a few fields changed anywhere below `data` and the loss."""
    request = wire_pb2.ForwardBackwardRequest()
    request.ParseFromString(body)
    for _ in range(rng.choice((1, 1, 2, 5))):
        change_field(
            rng, request, [each for each in request.DESCRIPTOR.fields if each.number > SEQ_ID_FIELD]
        )
    return request.SerializeToString()


def change_field(rng, parent, fields):
    field = rng.choice(fields)
    value, kind = getattr(parent, field.name), field.message_type
    if kind is not None and kind.GetOptions().map_entry:
        key = rng.choice([*value, "other"])
        if kind.fields_by_name["value"].message_type is not None:
            change_field(rng, value[key], value[key].DESCRIPTOR.fields)
        else:
            value[key] = rng.choice(NUMBERS)
    elif kind is not None:
        if field.is_repeated:
            value = value.add() if not value or rng.random() < 0.1 else rng.choice(value)
        change_field(rng, value, value.DESCRIPTOR.fields)
    elif field.is_repeated:
        value[rng.randrange(len(value) + 1) :] = [
            rng.choice(INTEGERS) for _ in range(rng.randrange(3))
        ]
    elif isinstance(value, bytes):
        setattr(parent, field.name, changed(rng, value, 0) if value else rng.randbytes(8))
    elif isinstance(value, str):
        setattr(
            parent, field.name, rng.choice(("", "x" * 300, "ppo", "gspo", "importance_sampling"))
        )
    elif isinstance(value, bool):
        setattr(parent, field.name, not value)
    else:
        setattr(parent, field.name, rng.choice(NUMBERS if isinstance(value, float) else INTEGERS))


def read(body, model):
    """Whether the body is protobuf, and its number if it is for `model`: 0 = none.

    Of a body that is not, the server takes the beginning (`leading_number`).
    """
    request = wire_pb2.ForwardBackwardRequest()
    try:
        request.ParseFromString(body)
        number_of, is_protobuf = (request.model_id, request.seq_id), True
    except DecodeError:
        number_of, is_protobuf = leading_number(body), False
    return is_protobuf, number_of[1] if number_of and number_of[0] == model else 0


class Target:
    """A model that changed bodies are sent to, each with its next number or, not `numbered`, with
    none.

    A number that was used is refused without a look at the datums. A body whose number became
    another one waits for its turn, and all others with it: then a new model takes the place.
    """

    def __init__(self, client, *, numbered):
        self.client, self.numbered, self.models = client, numbered, 0
        self.statuses, self.results = Counter(), Counter()
        self.begin()

    def begin(self):
        self.models += 1
        self.model = self.client.create_model(2 * self.models + self.numbered)
        self.next = 1

    def send(self, rng):
        seq_id = self.next if self.numbered else 0
        plain = request_of(
            [ENTRY] * (1 + self.numbered), "cross_entropy", model_id=self.model, seq_id=seq_id
        )
        head = len(request_of([], "", model_id=self.model, seq_id=seq_id))
        body = changed(rng, plain, head) if rng.random() < 0.5 else with_other_fields(rng, plain)
        answer = self.client.http.post(
            f"{API}/forward_backward", content=body, headers={"Content-Type": PROTOBUF}
        )
        self.statuses[answer.status_code] += 1
        if answer.status_code != httpx.codes.OK:
            return
        request, number = read(body, self.model)
        self.results["protobuf"] += request
        if (number or self.next) != self.next:
            self.results["another number"] += 1
            self.client.post("unload_model", model_id=self.model)
            self.begin()
            return
        self.next += 1
        result = self.client.result(answer.json())
        self.results["computed" if isinstance(result, bytes) else result["category"]] += 1


def main(count):
    rng = random.Random(5)
    configure_logging(level="error")
    with (
        tempfile.TemporaryDirectory() as folder,
        tinker_server(Path(folder)) as server,
        server.http() as http,
    ):
        client = WireClient(http)
        targets = [Target(client, numbered=numbered) for numbered in (False, True)]
        for number in range(count):
            targets[number % 2].send(rng)
        for name, target in zip(("without a number", "with its next number"), targets, strict=True):
            print(f"{name}: statuses {dict(target.statuses)}, results {dict(target.results)}")
        fresh = client.create_model(0)
        assert client.output(client.send(fresh, 1, [ENTRY], "cross_entropy")).metrics["loss:sum"]
        bad = any(status >= 500 for target in targets for status in target.statuses)
        bad |= any(target.results["server"] for target in targets)
        print("FAIL" if bad else f"ok: {count} bodies, no 500, and the server still trains")
        return int(bad)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 10_000))
