"""Writes mlx_parallm/faces/tinker/wire_pb2.py, of wire.proto beside it: `.venv/bin/python
scripts/generate_tinker_proto.py`, with Python 3.11 or 3.12.

The compiler is that of grpcio-tools 1.62 (protobuf 4.25), in an environment that is thrown away.
Its code is the last one that does not compare its version with the library's, so every protobuf
from 5 on loads it. tests/tinker/test_wire.py fails while the two files differ.
"""

import subprocess
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROTO = "mlx_parallm/faces/tinker/wire.proto"
PACKAGES = ("grpcio-tools==1.62.3", "setuptools<81")


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        venv.create(directory, with_pip=True)
        python = Path(directory) / "bin" / "python"
        install = [python, "-m", "pip", "--disable-pip-version-check", "--quiet", "install"]
        subprocess.run([*install, *PACKAGES], check=True)
        protoc = [python, "-m", "grpc_tools.protoc", "--proto_path=.", "--python_out=."]
        subprocess.run([*protoc, PROTO], check=True, cwd=ROOT)


if __name__ == "__main__":
    main()
