"""10,000 protobuf bodies with bytes changed, cut or repeated, over HTTP: no 500, and the server still trains.

.venv/bin/python -m scripts.tinker.fuzz [COUNT]
"""

import random
import sys
import tempfile
from collections import Counter
from pathlib import Path

from mlx_parallm.system.log import configure_logging
from mlx_parallm.tinker.wire import PROTOBUF
from tests.tinker.serving import API, WireClient, request_of, tinker_server

ENTRY = {
    "tokens": [1, 2, 3],
    "target_tokens": [2, 3, 4],
    "weights": [0.5, -1.0, 0.0],
    "spans": [("", 0, 2), ("x-1", 4, 1)],
}


def changed(rng, body):
    body = bytearray(body)
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        at, kind = rng.randrange(len(body)), rng.randrange(3)
        if kind == 0:
            body[at] = rng.randrange(256)
        elif kind == 1:
            del body[at : at + rng.randint(1, 9)]
        else:
            body[at:at] = body[at : at + rng.randint(1, 9)]
    return bytes(body)


def main(count):
    rng = random.Random(5)
    configure_logging(level="error")
    with tempfile.TemporaryDirectory() as folder, tinker_server(Path(folder)) as server, server.http() as http:
        client = WireClient(http)
        model = client.create_model()
        plain = request_of([ENTRY, ENTRY], "cross_entropy", model_id=model, seq_id=1)
        # Without a number each body that can be read is the next request, so its datums are looked at too.
        unnumbered = request_of([ENTRY], "cross_entropy", model_id=model)
        statuses, results = Counter(), Counter()
        for number in range(count):
            body = changed(rng, plain if number % 2 else unnumbered)
            answer = http.post(f"{API}/forward_backward", content=body, headers={"Content-Type": PROTOBUF})
            statuses[answer.status_code] += 1
            if answer.status_code == 200 and number % 2 == 0:
                result = client.result(answer.json())
                results["computed" if isinstance(result, bytes) else result["category"]] += 1
        print(f"{count} bodies: statuses {dict(statuses)}, results {dict(results)}")
        fresh = client.create_model(1)
        assert client.output(client.send(fresh, 1, [ENTRY], "cross_entropy")).metrics["loss:sum"]
        bad = [status for status in statuses if status >= 500] or results["server"]
        print("FAIL" if bad else "ok: no 500, and the server still trains")
        return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 10_000))
