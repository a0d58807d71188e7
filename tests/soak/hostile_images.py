"""Hostile images sent to a real server over its three APIs: each has to be a 400 within a second,
with the image's place, and the server has to live, answer, and stay within its memory.

    python -m tests.soak.hostile_images --count 500

Bombs (of pixels, of a text, of a profile), pictures of 100 megapixels, truncated and changed files,
files of other kinds, SVG with entities, moving pictures, impossible EXIF, URLs that are none. A
file whose pixels can be read in spite of what was done to it (a broken EXIF) has to be read: then
the answer is a 200. Between them the server answers good pictures.
"""

import argparse
import base64
import io
import random
import struct
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
from PIL import Image
from rich.console import Console

from scripts.server_process import command, server_process

CLIENTS = 2
GOOD_EVERY = 25  # requests
SIDES = (48, 300)


@dataclass(frozen=True)
class Hostile:
    kind: str
    url: str
    readable: bool = False  # its pixels are there, whatever is wrong beside them


@dataclass
class Outcome:
    """What the server did. `memory_mb`: of its process, before, and the most."""

    statuses: Counter[tuple[str, int]] = field(default_factory=Counter)
    slowest_s: dict[str, float] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    good: int = 0
    memory_mb: tuple[float, float] = (0.0, 0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--model", default="builtin:tiny-vision")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    outcome = attack(args.model, args.count, args.seed)
    console = Console(width=120)
    for (kind, status), number in sorted(outcome.statuses.items()):
        slowest = outcome.slowest_s[kind]
        console.print(f"{kind:24} {status}: {number:4}   slowest {slowest:.3f} s")
    before, most = outcome.memory_mb
    console.print(f"good pictures answered: {outcome.good}")
    console.print(f"memory of the server: {before:.0f} MB before, {most:.0f} MB at the peak")
    console.print(f"slowest: {max(outcome.slowest_s.values()):.3f} s")
    if outcome.wrong:
        raise SystemExit("\n".join(outcome.wrong))


def attack(model: str, count: int, seed: int = 0, *, limit_s: float = 1.0) -> Outcome:
    """Send `count` of them, and good pictures in between. What was not as it has to be is in
    `wrong`."""
    outcome = Outcome()
    words: Callable[[int], list[str | Path]] = lambda port: [  # noqa: E731
        command("mlx_parallm_serve"),
        *("--model-path", model, "--port", str(port), "--set", "vision.enabled=true"),
    ]
    with server_process(words) as (url, process), httpx.Client(base_url=url, timeout=60) as http:
        server = psutil.Process(process.pid)
        ask(http, 0, data_url(picture_file()))  # the first picture makes what is made once
        before = server.memory_info().rss / 1e6

        def one(number: int, hostile: Hostile) -> None:
            started = time.perf_counter()
            reply = ask(http, number, hostile.url)
            seconds = time.perf_counter() - started
            outcome.statuses[hostile.kind, reply.status_code] += 1
            outcome.slowest_s[hostile.kind] = max(seconds, outcome.slowest_s.get(hostile.kind, 0.0))
            if fault := wrong_with(reply, seconds, hostile, limit_s):
                outcome.wrong.append(f"{hostile.kind}: {fault}")
            if number % GOOD_EVERY == 0:
                reply = ask(http, number, data_url(picture_file()))
                outcome.good += reply.is_success
                if not reply.is_success:
                    outcome.wrong.append(f"a good picture was refused: {reply.text[:200]}")

        with ThreadPoolExecutor(CLIENTS) as pool:
            list(pool.map(one, range(count), hostile_images(count, seed)))
        outcome.memory_mb = before, peak_mb(process.pid)
        if process.poll() is not None:
            outcome.wrong.append(f"the server ended with {process.returncode}")
    return outcome


def wrong_with(reply: httpx.Response, seconds: float, hostile: Hostile, limit_s: float) -> str:
    """Return what is wrong with an answer; "" where nothing is."""
    if reply.status_code == httpx.codes.OK and hostile.readable:
        return ""
    if reply.status_code != httpx.codes.BAD_REQUEST:
        return f"HTTP {reply.status_code}: {reply.text[:200]}"
    if seconds > limit_s:
        return f"refused after {seconds:.2f} s"
    if "content.0" not in reply.text and "input.0" not in reply.text:
        return f"no place: {reply.text[:200]}"
    return ""


def peak_mb(pid: int) -> float:
    """Return the most memory that a process had, in MB."""
    file = Path(f"/proc/{pid}/status")
    if not file.exists():  # macOS
        return float(psutil.Process(pid).memory_info().rss / 1e6)
    line = next(line for line in file.read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1e3


def ask(http: httpx.Client, number: int, url: str) -> httpx.Response:
    """Ask about an image through one of the three APIs, in turn."""
    api = number % 3
    if api == 0:
        image: dict[str, Any] = {"type": "image_url", "image_url": {"url": url}}
        text = {"type": "text", "text": "Which colour?"}
        messages = [{"role": "user", "content": [image, text]}]
        body = {"model": "default", "messages": messages, "max_tokens": 1}
        return http.post("/v1/chat/completions", json=body)
    if api == 1:
        image = {"type": "input_image", "image_url": url}
        text = {"type": "input_text", "text": "Which colour?"}
        body = {"model": "default", "input": [{"role": "user", "content": [image, text]}]}
        return http.post("/v1/responses", json={**body, "max_output_tokens": 16})
    kind, _, data = url.removeprefix("data:").partition(";base64,")
    source = {"type": "base64", "media_type": kind or "image/png", "data": data}
    text = {"type": "text", "text": "Which colour?"}
    messages = [{"role": "user", "content": [{"type": "image", "source": source}, text]}]
    body = {"model": "default", "messages": messages, "max_tokens": 1}
    return http.post("/v1/messages", json=body)


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


# ---------------------------------------------------------------------- what is sent


def hostile_images(count: int, seed: int) -> Iterator[Hostile]:
    chance = random.Random(seed)
    kinds = [*KINDS]
    for number in range(count):
        kind = kinds[number % len(kinds)]
        made = KINDS[kind](chance)
        url = made if isinstance(made, str) else data_url(made)
        yield Hostile(kind, url, readable=kind in READABLE)


def picture_file(kind: str = "PNG", side: int = SIDES[0], **options: Any) -> bytes:
    pixels = np.random.default_rng(side).integers(0, 256, (side, side, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind, **options)
    return file.getvalue()


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, data: bytes, *extra: bytes) -> bytes:
    """A PNG of grey levels that says this size. `data`: compressed."""
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    parts = [chunk(b"IHDR", header), *extra, chunk(b"IDAT", data), chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


@cache
def large(side: int) -> bytes:
    """A whole, valid picture of side² pixels, in a file of a thousandth of that."""
    return png(side, side, zlib.compress(bytes((side + 1) * side), 9))


@cache
def zeros(mb: int) -> bytes:
    return zlib.compress(bytes(mb << 20), 9)


def bomb(chance: random.Random) -> bytes:
    side = chance.choice([30_000, 60_000, 2**31 - 1])
    return png(side, side, zeros(64))


def megapixels(chance: random.Random) -> bytes:
    return large(10_000)


def profile_bomb(chance: random.Random) -> bytes:
    kind, head = chance.choice(
        [(b"zTXt", b"k\0\0"), (b"iCCP", b"p\0\0"), (b"iTXt", b"k\0\1\0\0\0")]
    )
    return png(48, 48, zlib.compress(bytes(40 * 48)), chunk(kind, head + zeros(128)))


def more_than_said(chance: random.Random) -> bytes:
    return png(40, 40, zeros(64))


def truncated(chance: random.Random) -> bytes:
    data = picture_file(chance.choice(["PNG", "JPEG", "WEBP"]), chance.choice(SIDES))
    return data[: chance.randrange(1, len(data) // 3)]


def changed(chance: random.Random) -> bytes:
    data = bytearray(picture_file("PNG", chance.choice(SIDES)))
    for _ in range(40):  # behind the header: its checksums do not fit
        data[chance.randrange(40, len(data))] ^= 1 + chance.randrange(255)
    return bytes(data)


def other_kind(chance: random.Random) -> bytes:
    heads = [b"%PDF-1.7\n", b"MZ\x90\0", b"\x7fELF", b"PK\3\4", b"%!PS-Adobe-3.0 EPSF-3.0\n", b""]
    saved = [picture_file(kind) for kind in ("BMP", "TIFF", "ICO", "PPM", "TGA")]
    head = chance.choice([*heads, *saved])
    return head if head in saved else head + chance.randbytes(chance.randrange(1, 5000))


def svg(chance: random.Random) -> bytes:
    entity = '<!ENTITY x SYSTEM "file:///etc/passwd">'
    start = chance.choice(["", '<?xml version="1.0"?>', f"<!DOCTYPE svg [{entity}]>"])
    return f'{start}<svg xmlns="http://www.w3.org/2000/svg"><text>&x;</text></svg>'.encode()


def moving(chance: random.Random) -> bytes:
    frames = [Image.new("RGB", (40, 40), (shade, 0, 0)) for shade in range(0, 250, 25)]
    file = io.BytesIO()
    kind = chance.choice(["GIF", "WEBP", "PNG"])
    frames[0].save(file, kind, save_all=True, append_images=frames[1:])
    return file.getvalue()


def exif(chance: random.Random) -> bytes:
    """A JPEG whose EXIF is noise, a loop, or an orientation that there is not."""
    values = [
        b"Exif\0\0" + chance.randbytes(200),
        b"Exif\0\0II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0\xff\xff\0\0\x08\0\0\0",
        b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\xff\xff\xff\xff\0\0\0\0",
    ]
    return picture_file("JPEG", exif=chance.choice(values))


def stretched(chance: random.Random) -> bytes:
    width = chance.choice([5_000, 200_000])
    return png(width, 1, zlib.compress(bytes(width + 1)))


def no_url(chance: random.Random) -> str:
    return chance.choice(
        [
            "data:image/png;base64,@@@@",
            "data:image/png;base64,",
            "data:text/html;base64,PGI+",
            "data:image/png;base64,AA",
        ]
    )


def noise(chance: random.Random) -> bytes:
    return b"\x89PNG\r\n\x1a\n" + chance.randbytes(chance.randrange(10_000))


KINDS: dict[str, Callable[[random.Random], bytes | str]] = {
    "bomb of pixels": bomb,
    "100 megapixels": megapixels,
    "bomb beside pixels": profile_bomb,
    "more pixels than said": more_than_said,
    "truncated": truncated,
    "changed": changed,
    "another kind of file": other_kind,
    "SVG": svg,
    "moving": moving,
    "EXIF": exif,
    "stretched": stretched,
    "no data URL": no_url,
    "noise": noise,
}
READABLE = ("EXIF", "bomb beside pixels", "more pixels than said")
"""Kinds of which some have readable pixels all the same: Pillow reads around what is wrong."""

if __name__ == "__main__":
    main()
