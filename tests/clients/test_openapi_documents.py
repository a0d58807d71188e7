"""clients/typescript is typed from the OpenAPI documents of today; its own `npm test` compares
the types with them."""

import json

import pytest

import mlx_parallm
from scripts.generate_openapi import DIRECTORY, DOCUMENTS, text_of


@pytest.mark.parametrize("name", DOCUMENTS)
def test_the_committed_document_is_todays(name: str) -> None:
    how = (
        "run: .venv/bin/python -m scripts.generate_openapi && (cd"
        " clients/typescript && npm run generate)"
    )
    assert (DIRECTORY / name).read_text(encoding="utf-8") == text_of(name), how


def test_the_package_has_the_version_of_the_server() -> None:
    assert (
        json.loads((DIRECTORY.parent / "package.json").read_text())["version"]
        == mlx_parallm.__version__
    )
