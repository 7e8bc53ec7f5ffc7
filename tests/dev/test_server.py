"""Starting ComfyUI: a server that has taken the free port in between is not mistaken for it."""

from __future__ import annotations

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from devtools import server as module
from devtools.server import Server, ServerSpec

MAIN = """
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Answer(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"system": {"argv": sys.argv}}).encode())

HTTPServer.allow_reuse_address = False
HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Answer).serve_forever()
"""


class Stranger(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"system": {"argv": ["main.py", "--base-directory", "elsewhere"]}}).encode())

    def log_message(self, *_: object) -> None:
        pass


def test_another_server_on_the_port_is_not_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "main.py").write_text(MAIN)
    (tmp_path / "models").mkdir()
    free = module.usable_port(None)
    with HTTPServer(("127.0.0.1", 0), Stranger) as stranger:
        threading.Thread(target=stranger.serve_forever, daemon=True).start()
        ports = iter([stranger.server_port, free])
        monkeypatch.setattr(module, "usable_port", lambda wanted: next(ports))
        with Server(ServerSpec(tmp_path, Path(sys.executable), tmp_path / "base", tmp_path / "models")) as server:
            assert server.client.address.endswith(f":{free}")
            assert str(tmp_path / "base") in server.client.get("/system_stats")["system"]["argv"]
        stranger.shutdown()
