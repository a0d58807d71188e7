import pytest

pytest.importorskip("gguf", reason="needs gguf: the extra `export`")
