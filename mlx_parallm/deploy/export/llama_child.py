"""Serve a GGUF file by xllamacpp until standard input ends, which it does with the parent. Run by
its path.

    python llama_child.py FILE URL_FILE CONTEXT HOST THREADS [ADAPTER]

Writes the server's URL into URL_FILE once the file is loaded. Keys and values are float32. THREADS
0: as many as llama.cpp chooses.
"""

import os
import sys
from pathlib import Path

import xllamacpp


def main(
    file: str, url_file: str, context: str, host: str, threads: str, adapter: str | None = None
) -> None:
    params = xllamacpp.CommonParams()
    params.model.path = file
    params.hostnames, params.port = [host], 0
    params.n_ctx, params.n_parallel, params.use_jinja, params.warmup = int(context), 1, True, False
    # a GPU rounds float32 to float16
    params.n_gpu_layers, params.no_kv_offload, params.no_op_offload = 0, True, True
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    if int(threads):
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = int(threads)
    if adapter:
        params.lora_adapters = [xllamacpp.CommonAdapterLoraInfo(adapter, 1.0)]
    server = xllamacpp.Server(params)
    unfinished = Path(f"{url_file}.unfinished")
    unfinished.write_text(f"{server.listening_address}\n")
    unfinished.rename(url_file)
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
