"""The calls of an upload, as huggingface.co answers them, for `scripted_http`."""

import base64
import json
from typing import Any

from tests.scripted_http import Reply


class Hub:
    """Keeps what was committed, by its path."""

    def __init__(self, url: str, status: int = 200) -> None:
        self.url, self.status, self.private = url, status, False
        self.files: dict[str, bytes] = {}

    def answer(self, path: str, body: Any) -> Reply:
        if self.status != 200:
            return self.status, {}, {"error": "no"}
        if path.endswith("/repos/create"):
            self.private = body.get("private") is True or body.get("visibility") == "private"
            return 200, {}, {"url": self.url}
        if "/preupload/" in path:
            files = [
                {"path": each["path"], "uploadMode": "regular", "shouldIgnore": False}
                for each in body["files"]
            ]
            return 200, {}, {"files": files}
        if "/commit/" in path:
            committed = [
                line["value"]
                for line in map(json.loads, body.splitlines())
                if line["key"] == "file"
            ]
            self.files |= {file["path"]: base64.b64decode(file["content"]) for file in committed}
            return (
                200,
                {},
                {"success": True, "commitUrl": f"{self.url}/commit/1", "commitOid": "1" * 40},
            )
        return 200, {}, {"id": "me/runs", "sha": "1" * 40, "siblings": []}
