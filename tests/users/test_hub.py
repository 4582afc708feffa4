"""Hub ids as model names: the real client, with a local server in place of the hub."""

from __future__ import annotations

import http.server
import json
import threading

import pytest
from helpers.processes import python

from hf_ckpt.models.tiny import tiny_model

ID = "someone/a-model"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(http.server.BaseHTTPRequestHandler):
    """Serves one model that has only a config. Source: https://huggingface.co/docs/hub/api and the client's source."""

    asked: list[str] = []
    config = b""

    def do_GET(self):
        self.asked.append(self.path)
        known = self.path.startswith((f"/{ID}/", f"/api/models/{ID}"))
        body = self.config if self.path == f"/{ID}/resolve/main/config.json" else b""
        error = "EntryNotFound" if known else "RepoNotFound"
        headers = {"ETag": '"of-the-config"', "X-Repo-Commit": COMMIT} if body else {"X-Error-Code": error}
        self.send_response(200 if body else 404)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body if self.command == "GET" else b"")

    do_HEAD = do_GET

    def log_message(self, *_): ...


@pytest.fixture
def hub(monkeypatch):
    """Environment variables that make a local server the hub."""
    model = tiny_model("llama", layers=2)
    config = {**model.config.to_diff_dict(), "architectures": ["LlamaForCausalLM"]}
    monkeypatch.setattr(Hub, "config", json.dumps(config).encode())
    monkeypatch.setattr(Hub, "asked", [])
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HUB_OFFLINE": "0"}
    server.shutdown()
    server.server_close()


def plan(model, hub, tmp_path):
    words = ("-m", "hf_ckpt.cli.main", "plan", model, "--device", "t4", "--seq", "32", "--json")
    return python(*words, extra={"HF_HOME": str(tmp_path), **hub})


@pytest.mark.long
def test_an_id_of_the_hub_is_a_model(hub, tmp_path):
    done = plan(ID, hub, tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["fits"] is True
    assert found["plan"]["model"] == "LlamaForCausalLM"
    assert f"/{ID}/resolve/main/config.json" in Hub.asked
    hub["HF_HUB_OFFLINE"] = "1"
    asked = len(Hub.asked)
    assert plan(ID, hub, tmp_path).stdout == done.stdout
    assert len(Hub.asked) == asked  # read from the cache


def test_an_id_that_the_hub_does_not_know_is_refused(hub, tmp_path):
    done = plan("someone/no-model", hub, tmp_path)
    assert done.returncode == 2
    assert "cannot read a model's config from 'someone/no-model'" in done.stderr
    assert "Traceback" not in done.stderr
    assert "/someone/no-model/resolve/main/config.json" in Hub.asked
