"""Serve a GGUF file by llama.cpp's server (xllamacpp, extra `export`) as its users start it, for
the benchmarks.

    python scripts/bench/llama_server.py model.gguf --port 8000 --parallel 64 --context 256

Imports nothing of this package: the peer is measured alone. `--context`: positions of each of the
parallel sequences. All cores compute, keys and values are float16 and attention is fused:
llama.cpp's defaults.
"""

import argparse
import os
import threading

import xllamacpp

if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--parallel", type=int, required=True)
    parser.add_argument("--context", type=int, required=True)
    arguments = parser.parse_args()
    params = xllamacpp.CommonParams()
    params.model.path = arguments.file
    params.hostnames, params.port = ["127.0.0.1"], arguments.port
    params.n_parallel, params.n_ctx = arguments.parallel, arguments.parallel * arguments.context
    params.n_gpu_layers = 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = os.cpu_count() or 1
    server = xllamacpp.Server(params)
    threading.Event().wait()
