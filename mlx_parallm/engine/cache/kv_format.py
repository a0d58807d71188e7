"""How keys and values are held: as they were computed, or in 8 or 4 bits (server.kv_bits) by
mlx-lm's scheme.

`mx.quantize` packs a head's numbers in groups along the head dimension; each group has a scale and
a bias, and a number is scale · q + bias with an integer q. Keys are then three arrays: q packed in
uint32, scales, biases. So are values.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import mlx.core as mx

from mlx_parallm.models.attention_parts import Factor
from mlx_parallm.models.ops import product_of_unpacked
from mlx_parallm.system.device.traits import unpacks_weights

Parts = tuple[mx.array, mx.array, mx.array]  # q, scales, biases
GROUP_SIZES = (64, 32)  # mlx-lm's default, and the smallest of MLX
# on a CPU: fewer rows are faster with MLX's product by values; by keys it is never faster
UNPACKED_FROM = 4


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """A quantised factor of attention: keys, of which the product takes the transpose, or
    values."""

    arrays: Parts  # q [..., T, D · bits / 32] uint32, scales and biases [..., T, D / group_size]
    format: "KVFormat"
    is_keys: bool

    @property
    def dtype(self) -> mx.Dtype:
        """The dtype before quantisation."""
        return self.arrays[1].dtype

    def product(self, x: mx.array) -> mx.array:
        """x [..., rows, D] times the transposed keys [..., D, T], or x [..., rows, T] times the
        values [..., T, D].

        On a CPU float32: unpacking for the moment and a BLAS product is faster there. Of half
        precision it is always
        taken: MLX's product on a CPU would add up all T positions in half precision.
        """
        unpacks = self.is_keys or x.shape[-2] >= UNPACKED_FROM or self.dtype != mx.float32
        if unpacks and unpacks_weights():
            assert self.format.bits is not None
            return product_of_unpacked(
                x.astype(mx.float32), self.arrays, self.format.bits, transposed=self.is_keys
            )
        words, scales, biases = self.arrays
        size, bits = self.format.group_size, self.format.bits
        # bfloat16 rounds a score too far
        x = x.astype(mx.float32 if self.is_keys else scales.dtype)
        return mx.quantized_matmul(x, words, scales, biases, self.is_keys, size, bits)


@dataclass(frozen=True, slots=True)
class KVFormat:
    """`bits` 8 or 4; None: as they were computed."""

    bits: int | None = None
    group_size: int = GROUP_SIZES[0]

    @classmethod
    def fitting(cls, bits: int, head_dims: Iterable[int]) -> "KVFormat | None":
        """The format with the largest groups that divide all of these head dimensions; None:
        there is none."""
        widths = set(head_dims)
        sizes = [size for size in GROUP_SIZES if not any(width % size for width in widths)]
        return cls(bits, sizes[0]) if sizes else None

    @property
    def arrays(self) -> int:
        """How many arrays hold a layer's keys and values."""
        return 2 if self.bits is None else 6

    def pack(self, keys: mx.array, values: mx.array) -> list[mx.array]:
        """The arrays [..., T, ·] that hold keys and values [..., T, D]."""
        if self.bits is None:
            return [keys, values]
        return [
            array for x in (keys, values) for array in mx.quantize(x, self.group_size, self.bits)
        ]

    def unpack(self, arrays: Sequence[mx.array]) -> tuple[mx.array, mx.array]:
        """Keys and values [..., T, D] of a layer's arrays, in the type that they were computed
        in."""
        if self.bits is None:
            return arrays[0], arrays[1]
        keys, values = (
            mx.dequantize(*part, self.group_size, self.bits) for part in _halves(arrays)
        )
        return keys, values

    def factors(self, arrays: Sequence[mx.array]) -> tuple[Factor, Factor]:
        """The two factors of a layer's attention: keys for `queries · keysᵀ`, and values."""
        if self.bits is None:
            return arrays[0].swapaxes(-1, -2), arrays[1]
        keys, values = _halves(arrays)
        return Packed(keys, self, is_keys=True), Packed(values, self, is_keys=False)

    def layers(self, arrays: Sequence[mx.array]) -> list[Sequence[mx.array]]:
        """The arrays of all layers, by layer."""
        return [arrays[start : start + self.arrays] for start in range(0, len(arrays), self.arrays)]


AS_COMPUTED = KVFormat()


def _halves(arrays: Sequence[mx.array]) -> tuple[Parts, Parts]:
    """Split a layer's arrays into those of the keys and those of the values."""
    words, scales, biases, *values = arrays
    return (words, scales, biases), (values[0], values[1], values[2])
