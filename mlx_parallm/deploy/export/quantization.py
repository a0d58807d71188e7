"""The types of a file's tensors, and their bytes.

f32, f16, bf16, q8_0 and q4_0 are written by the `gguf` package. The K-quants are computed by
llama.cpp itself: its function `ggml_quantize_chunk`, from whichever package of it can be imported.
Which tensor of a mixture such as Q4_K_M has which type is llama.cpp's rule (src/llama-quant.cpp,
`llama_tensor_get_type_impl`), without an importance matrix.
"""

import ctypes
import importlib.util
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from gguf import LlamaFileType

from mlx_parallm.errors import ModelError

F16_MAX = float(np.finfo(np.float16).max)
BLOCK = 32  # numbers; no quantised type has a smaller block
PLAIN = {"f32": Type.F32, "f16": Type.F16, "bf16": Type.BF16, "q8_0": Type.Q8_0, "q4_0": Type.Q4_0}
FILE_TYPES = {
    "f32": LlamaFileType.ALL_F32,
    "f16": LlamaFileType.MOSTLY_F16,
    "bf16": LlamaFileType.MOSTLY_BF16,
    "q8_0": LlamaFileType.MOSTLY_Q8_0,
    "q4_0": LlamaFileType.MOSTLY_Q4_0,
    "q6_k": LlamaFileType.MOSTLY_Q6_K,
    "q5_k_m": LlamaFileType.MOSTLY_Q5_K_M,
    "q5_k_s": LlamaFileType.MOSTLY_Q5_K_S,
    "q4_k_m": LlamaFileType.MOSTLY_Q4_K_M,
    "q4_k_s": LlamaFileType.MOSTLY_Q4_K_S,
    "q3_k_m": LlamaFileType.MOSTLY_Q3_K_M,
    "q2_k": LlamaFileType.MOSTLY_Q2_K,
}
# Where rows are not multiples of 256.
FALLBACK = {
    Type.Q2_K: Type.Q4_0,
    Type.Q3_K: Type.Q4_0,
    Type.Q4_K: Type.Q5_0,
    Type.Q5_K: Type.Q5_1,
    Type.Q6_K: Type.Q8_0,
}
LAYERS_OF_70B = 80
MANY_EXPERTS = 8  # llama.cpp's rules for a mixture of exactly so many
LIBRARIES = (("xllamacpp", "*.so"), ("llama_cpp", "lib/libggml-base.*"))


@dataclass(frozen=True)
class Mixture:
    """The facts on which llama.cpp's rules depend, beside a tensor's name."""

    kind: str
    layers: int
    heads_per_kv: int = 1
    experts: int = 0
    tied: bool = False

    def type_of(self, name: str, shape: tuple[int, ...]) -> Type:
        """Return the type of a tensor of the file; shape as in mlx-lm. Norms, biases and the
        experts' gate stay f32."""
        if len(shape) < 2 or "ffn_gate_inp" in name or not name.endswith(".weight"):
            return Type.F32
        chosen = PLAIN[self.kind] if self.kind in PLAIN else self._mixed(name, shape)
        return _fitting(chosen, shape[-1])

    def _mixed(self, name: str, shape: tuple[int, ...]) -> Type:
        base = {
            "q2": Type.Q2_K,
            "q3": Type.Q3_K,
            "q4": Type.Q4_K,
            "q5": Type.Q5_K,
            "q6": Type.Q6_K,
        }[self.kind[:2]]
        if name == "output.weight" or (self.tied and name == "token_embd.weight"):
            return Type.Q8_0 if shape[-1] % gguf.GGML_QUANT_SIZES[base][0] else Type.Q6_K
        layer = int(block[1]) if (block := re.match(r"blk\.(\d+)\.", name)) else 0
        role = name.split(".")[-2].removesuffix("_exps")
        many = self.experts == MANY_EXPERTS
        if role in ("attn_v", "attn_k") and many:
            return Type.Q8_0
        if role == "attn_v":
            chosen = self._of_values(base, layer)
            large = self.layers == LAYERS_OF_70B and self.heads_per_kv > 1
            return Type.Q5_K if large and chosen in (Type.Q3_K, Type.Q4_K) else chosen
        if role == "ffn_down":
            return self._of_down(base, layer)
        if role == "attn_output":
            if many and self.kind in ("q2_k", "q3_k_m", "q4_k_s", "q4_k_m"):
                return Type.Q5_K
            if not many:
                return {"q2_k": Type.Q3_K, "q3_k_m": Type.Q4_K}.get(self.kind, base)
        return base

    def _of_values(self, base: Type, layer: int) -> Type:
        match self.kind:
            case "q2_k":
                return Type.Q4_K if self.heads_per_kv >= 4 else Type.Q3_K
            case "q3_k_m":
                return Type.Q5_K if layer < 2 else Type.Q4_K
            case "q4_k_m" | "q5_k_m" if self._more_bits(layer):
                return Type.Q6_K
            case "q4_k_s" if layer < 4:
                return Type.Q5_K
        return base

    def _of_down(self, base: Type, layer: int) -> Type:
        match self.kind:
            case "q2_k":
                return Type.Q3_K
            case "q3_k_m":
                return Type.Q5_K if layer < self.layers // 16 else Type.Q4_K
            case "q4_k_m" | "q5_k_m" if self._more_bits(layer):
                return Type.Q6_K
            case "q4_k_s" if layer < self.layers // 8:
                return Type.Q5_K
        return base

    def _more_bits(self, layer: int) -> bool:
        eighth = self.layers // 8
        return layer < eighth or layer >= 7 * self.layers // 8 or (layer - eighth) % 3 == 2


def check_type(kind: str) -> None:
    """Raises ModelError: no such type, or one that needs a llama.cpp, and none can be imported."""
    if kind not in FILE_TYPES:
        raise ModelError(f"--type {kind}: expected one of {', '.join(FILE_TYPES)}")
    if kind not in PLAIN and _quantize_chunk() is None:
        raise ModelError(
            f"--type {kind} is computed by llama.cpp, and neither xllamacpp nor llama_cpp can be"
            " imported: `pip install xllamacpp`; or export --type bf16 and run `llama-quantize"
            f" MODEL-bf16.gguf MODEL-{kind}.gguf {kind.upper()}`"
        )


def without_own_type(kind: str, types: Mapping[str, int]) -> str | None:
    """Return a sentence about a file of `kind` that has no tensor of the type in its name; None
    when it has one."""
    named_type = f"{kind[:2]}_k".upper() if kind not in PLAIN else kind.upper()
    if named_type in types:
        return None
    held = ", ".join(f"{count} {name}" for name, count in types.items())
    return (
        f"no tensor of this file is {named_type}: the rows of this model's matrices are no"
        " multiple of 256, so llama.cpp's"
        f" rules take other types ({held})"
    )


def size_of(kind: Type, shape: tuple[int, ...]) -> int:
    """Return the bytes of a tensor."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    return int(np.prod(shape, dtype=np.int64)) // block * size


def encode(
    pieces: Iterable[np.ndarray], kind: Type, shape: tuple[int, ...], name: str
) -> np.ndarray:
    """Return a tensor's bytes, [size] uint8, from its rows in float32 [rows, width], a piece at a
    time.

    Raises ModelError: a number is not finite, or too large for f16.
    """
    out = np.empty(size_of(kind, shape), np.uint8)
    place = 0
    for piece in pieces:
        if not np.isfinite(piece).all():
            raise ModelError(
                f"{name} holds a number that is not finite: the training has gone wrong"
            )
        if kind == Type.F16 and np.abs(piece).max() > F16_MAX:
            raise ModelError(
                f"{name} holds {np.abs(piece).max():g}, which f16 cannot: use --type bf16 or q8_0"
            )
        part = _bytes(piece, kind)
        out[place : place + part.size] = part
        place += part.size
    assert place == out.size
    return out


def _bytes(piece: np.ndarray, kind: Type) -> np.ndarray:
    if kind == Type.F32:
        return np.ascontiguousarray(piece).view(np.uint8).reshape(-1)
    if kind in (Type.F16, Type.BF16, Type.Q8_0, Type.Q4_0):
        return np.ascontiguousarray(gguf.quants.quantize(piece, kind)).view(np.uint8).reshape(-1)
    quantize = _quantize_chunk()
    assert quantize is not None, "check_type comes first"
    rows, width = piece.shape
    piece, out = (
        np.ascontiguousarray(piece, np.float32),
        np.empty(size_of(kind, piece.shape), np.uint8),
    )
    quantize(int(kind), piece.ctypes.data, out.ctypes.data, 0, rows, width, None)
    return out


def _fitting(kind: Type, width: int) -> Type:
    if width % gguf.GGML_QUANT_SIZES[kind][0] == 0:
        return kind
    smaller = FALLBACK.get(kind, kind)
    return smaller if width % BLOCK == 0 else Type.F16


@cache
def _quantize_chunk() -> Callable[..., int] | None:
    """Return ggml_quantize_chunk(type, source, target, start, rows, width, importance) of a
    llama.cpp; None: none is installed."""
    for package, pattern in LIBRARIES:
        spec = importlib.util.find_spec(package)
        for directory in (spec.submodule_search_locations or []) if spec else []:
            for file in sorted(Path(directory).glob(pattern)):
                try:
                    function = ctypes.CDLL(str(file)).ggml_quantize_chunk
                except (OSError, AttributeError):
                    continue
                pointer, number = ctypes.c_void_p, ctypes.c_int64
                function.argtypes = [
                    ctypes.c_int,
                    pointer,
                    pointer,
                    number,
                    number,
                    number,
                    pointer,
                ]
                function.restype = ctypes.c_size_t
                return function
    return None
