"""Settings of a server for the exported file, by this machine's hardware: Ollama's and
llama-server's."""

from dataclasses import asdict, dataclass
from typing import Any

from mlx_parallm.system.hardware import GIB, Hardware

MOST_CONTEXT = 32_768  # tokens a request; a longer context has to be set by hand
LEAST_CONTEXT = 2_048
CONTEXT_UNIT = 1_024
MOST_PARALLEL = 4
USED_SHARE = 0.8  # share of the memory; the system and activations take the rest
CACHE_BYTES = 2  # bytes a key or value
ALL_LAYERS = 999
SPARE_CORES = 2
# a parameter, about
BITS = {"q8_0": 8.5, "q6_k": 6.6, "q5_k_m": 5.7, "q4_k_m": 4.9, "q3_k_m": 3.9, "q2_k": 3.0}


@dataclass(frozen=True)
class OllamaHostingProfile:
    """The settings with which Ollama serves an exported model on this machine.

    Attributes:
        num_parallel: requests answered at once.
        num_ctx: tokens of each, prompt and answer.
        num_thread: CPU threads.
        num_gpu: layers on the GPU; 0 = none.
        flash_attention: for less memory; on a GPU.
        note: the reason why it does not fit; "" = it fits.
    """

    num_parallel: int
    num_ctx: int
    num_thread: int
    num_gpu: int
    flash_attention: bool
    note: str = ""

    def to_env(self) -> dict[str, str]:
        """Return the environment of `ollama serve`."""
        return {
            "OLLAMA_NUM_PARALLEL": str(self.num_parallel),
            "OLLAMA_CONTEXT_LENGTH": str(self.num_ctx),
            "OLLAMA_FLASH_ATTENTION": str(int(self.flash_attention)),
            "OLLAMA_MAX_LOADED_MODELS": "1",
        }

    def parameters(self) -> dict[str, int]:
        """Return the settings of a Modelfile."""
        return {"num_ctx": self.num_ctx}

    def llama_server(self, file: str) -> str:
        """Return the command that serves the file with these settings."""
        layers = f" -ngl {self.num_gpu}" if self.num_gpu else ""
        return (
            f"llama-server -m {file} --jinja -c {self.num_ctx * self.num_parallel} -np"
            f" {self.num_parallel}"
            f" -t {self.num_thread}{layers}"
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def hosting_profile(
    hardware: Hardware, file_bytes: int, arguments: Any, *, memory: int
) -> OllamaHostingProfile:
    """Return settings with which the model and its keys and values fit into the memory.

    Args:
        arguments: mlx-lm's model arguments.
        memory: bytes of the memory that will hold the model: the GPU's, or the machine's.
    """
    size = (
        getattr(arguments, "head_dim", None)
        or arguments.hidden_size // arguments.num_attention_heads
    )
    token_bytes = (
        2 * arguments.num_hidden_layers * arguments.num_key_value_heads * size * CACHE_BYTES
    )
    room = int(USED_SHARE * memory) - file_bytes
    longest = min(int(arguments.max_position_embeddings), MOST_CONTEXT)
    least = min(longest, LEAST_CONTEXT)
    on_gpu = hardware.backend != "cpu"
    parallel = MOST_PARALLEL if on_gpu else max(1, min(MOST_PARALLEL, hardware.cores // 4))
    while parallel > 1 and room < parallel * least * token_bytes:
        parallel -= 1
    fitting = max(0, room) // (parallel * token_bytes)
    context = max(least, min(longest, fitting // CONTEXT_UNIT * CONTEXT_UNIT))
    threads = hardware.cores - SPARE_CORES if hardware.cores > 2 * SPARE_CORES else hardware.cores
    note = _too_large(file_bytes, memory) if room < least * token_bytes else ""
    return OllamaHostingProfile(
        parallel, context, threads, ALL_LAYERS if on_gpu else 0, on_gpu, note
    )


def fitting_type(parameters: int, memory: int) -> str | None:
    """Return the finest type with which a model of so many parameters takes at most USED_SHARE
    of the memory."""
    return next(
        (kind for kind, bits in BITS.items() if parameters * bits / 8 <= USED_SHARE * memory), None
    )


def _too_large(file_bytes: int, memory: int) -> str:
    return (
        f"the file has {file_bytes / GIB:.1f} GiB, this machine has {memory / GIB:.1f} GiB for"
        " a model: it does not fit"
    )
