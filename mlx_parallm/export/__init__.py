"""Export a trained model as GGUF, to llama.cpp, Ollama or LM Studio. A leaf: docs/export.md, the extra `export`.

    model.py           which model: a run, or a base with an adapter; its tensors, one at a time
    architectures.py   the table of architectures: tensor names, rows in another order, metadata
    vocabulary.py      the tokenizer as GGUF has it, and the name of its pre-tokenizer
    quantization.py    the type of each tensor, and its bytes
    gguf_file.py       write the file, one tensor in memory at a time; the adapter's file
    llama_server.py    a real llama.cpp in a process of its own, and its HTTP API
    verify.py          compare it with our own engine
    ollama.py          the Modelfile, and Ollama's HTTP API
    hosting.py         settings of a server by this machine's hardware
    pipeline.py        the whole way; command.py is `mlx_parallm export`
"""
