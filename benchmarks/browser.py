"""The page that goes to the hub with a bundle, in a real browser: photos are uploaded and the answers compared.

    python benchmarks/browser.py --python DIR/bin/python [--browser chromium]

DIR is an environment with what the page's requirements.txt names, and nothing else: gradio, numpy, onnxruntime and
pillow (gradio asks for an older pillow than ours, so it has one of its own). The page is made from a small network
whose classes have names that would do harm where they are not escaped; Chromium, without a window, uploads images of
each kind, and the classes and percentages that the page shows are compared with the network's. Writes
results/browser.json.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import time
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from common import write_result
from PIL import Image

from basisprune import save_pretrained, transfer_model
from basisprune.data import prepare
from basisprune.data.decode import to_pixels
from basisprune.deploy.bundle import load_bundle
from basisprune.deploy.bundle.hub import page_files

NAMES = ["<img src=x onerror=\"document.title='harm'\">", "red fox", '{{7*7}} & "quotes"']
NEEDED = ("gradio", "numpy", "onnxruntime", "pillow")
FILE_INPUT = "input[type=file]"


class Browser:
    """Chromium without a window, spoken to through pipes."""

    def __init__(self, program: str, profile: Path) -> None:
        reads, self._out = os.pipe()
        self._in, writes = os.pipe()
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe"]
        self._process = subprocess.Popen(
            [program, *flags, "--no-first-run", f"--user-data-dir={profile}", "about:blank"],
            preexec_fn=lambda: (os.dup2(reads, 3), os.dup2(writes, 4)),
            close_fds=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self._number, self._buffer = 0, b""
        target = self._ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.complaints: list[str] = []
        for part in ("Page", "Runtime", "DOM"):
            self.ask(f"{part}.enable")

    def ask(self, method: str, **options: Any) -> dict[str, Any]:
        return self._ask(method, self._session, **options)

    def value(self, expression: str) -> Any:
        return self.ask("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def wait(self, expression: str, seconds: float = 90) -> Any:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if found := self.value(expression):
                return found
            time.sleep(0.3)
        raise SystemExit(f"the page has not come to {expression!r}; it shows {self.value('document.body.innerText')!r}")

    def upload(self, path: Path) -> None:
        root = self.ask("DOM.getDocument")["root"]["nodeId"]
        node = self.ask("DOM.querySelector", nodeId=root, selector=FILE_INPUT)["nodeId"]
        self.ask("DOM.setFileInputFiles", nodeId=node, files=[str(path)])

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(30)

    def _ask(self, method: str, session: str | None = None, **options: Any) -> dict[str, Any]:
        self._number += 1
        asked = {"id": self._number, "method": method, "params": options}
        os.write(self._out, json.dumps(asked | ({"sessionId": session} if session else {})).encode() + b"\0")
        while True:
            while b"\0" not in self._buffer:
                self._buffer += os.read(self._in, 1 << 16)
            text, _, self._buffer = self._buffer.partition(b"\0")
            said = json.loads(text)
            if said.get("method") == "Runtime.exceptionThrown":
                self.complaints.append(str(said["params"])[:300])
            if said.get("id") == self._number:
                if "error" in said:
                    raise SystemExit(f"{method}: {said['error']}")
                result: dict[str, Any] = said["result"]
                return result


def make_page(folder: Path) -> torch.nn.Module:
    torch.manual_seed(0)
    model = transfer_model("test_resnet", len(NAMES), input_size=64).eval()
    torch.nn.init.normal_(model.classifier.weight, std=0.2)  # answers that are not sure
    bundle = load_bundle(save_pretrained(model, folder / "bundle", classes=NAMES))
    for name, content in page_files(bundle, None, wanted=True).items():
        (folder / name).write_bytes(content)
    shutil.rmtree(folder / "bundle")
    return model


def photos(folder: Path) -> dict[str, Path]:
    folder.mkdir()
    dice = np.random.default_rng(1)
    shapes = {"colour": (70, 90, 3), "grey": (64, 64), "transparent": (50, 40, 4)}
    for name, shape in shapes.items():
        Image.fromarray(dice.integers(0, 256, shape, dtype=np.uint8)).save(folder / f"{name}.png")
    return {name: folder / f"{name}.png" for name in shapes}


def expected(model: torch.nn.Module, path: Path) -> dict[str, float]:
    spec = model.input_spec
    with Image.open(path) as image, torch.no_grad():
        shares = model(prepare(to_pixels(image, spec.size)[None], spec)).softmax(-1)[0]  # type: ignore[arg-type]
    return dict(zip(NAMES, shares.tolist(), strict=True))


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def look(browser: Browser, model: torch.nn.Module, pictures: dict[str, Path]) -> dict[str, Any]:
    results = {}
    for name, path in pictures.items():
        browser.wait(f"!!document.querySelector({FILE_INPUT!r})")
        browser.upload(path)
        browser.wait("[...document.querySelectorAll('button')].some(b => b.innerText.trim() === 'Submit')")
        browser.wait("!!document.querySelector('img[src*=\"/file=\"], [data-testid=image] img, .image-container img')")
        browser.value("[...document.querySelectorAll('button')].find(b => b.innerText.trim() === 'Submit').click()")
        browser.wait("document.body.innerText.includes('%')")
        lines = [line.strip() for line in browser.value("document.body.innerText").splitlines() if line.strip()]
        shown = {label: after for label, after in pairwise(lines) if after.endswith("%")}
        wanted = expected(model, path)
        near = [
            abs(100 * share - float(shown.get(label, "nan").rstrip("%"))) <= 0.51 for label, share in wanted.items()
        ]
        best = max(wanted, key=lambda label: wanted[label])
        results[name] = {"shown": shown, "expected": wanted, "good": all(near) and lines.count(best) == 2}
        browser.value("[...document.querySelectorAll('button')].find(b => b.innerText.trim() === 'Clear').click()")
        browser.wait("!document.body.innerText.includes('%')")
    harm = browser.value("document.title") == "harm" or bool(browser.value("!!document.querySelector('img[src=x]')"))
    return {"photos": results, "names do harm": harm, "complaints": browser.complaints}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", required=True, help="the Python of an environment with gradio")
    parser.add_argument("--browser", default="chromium")
    options = parser.parse_args()
    with TemporaryDirectory() as scratch:
        folder, port = Path(scratch) / "page", free_port()
        folder.mkdir()
        model, pictures = make_page(folder), photos(Path(scratch) / "photos")
        code = "import importlib.metadata as m, json; print(json.dumps({d.name: d.version for d in m.distributions()}))"
        packages = json.loads(subprocess.run([options.python, "-c", code], capture_output=True, check=True).stdout)
        there = {
            name: packages.get(name) for name in ("gradio", "numpy", "onnxruntime", "pillow", "torch", "basisprune")
        }
        quiet = {"GRADIO_SERVER_PORT": str(port), "GRADIO_ANALYTICS_ENABLED": "False", "HF_HUB_OFFLINE": "1"}
        variables = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | quiet
        server = subprocess.Popen([options.python, "app.py"], cwd=folder, env=variables)
        browser = Browser(options.browser, Path(scratch) / "profile")
        try:
            wait_for(port)
            browser.ask("Page.navigate", url=f"http://127.0.0.1:{port}/")
            found = look(browser, model, pictures)
        finally:
            browser.close()
            server.terminate()
            server.wait(30)
    good = all(each["good"] for each in found["photos"].values()) and not found["names do harm"]
    print(json.dumps(found, indent=1), write_result("browser", {"packages": there}, found | {"good": good}))
    if not good:
        raise SystemExit("the page does not show what the network says")


def wait_for(port: int, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with socket.socket() as door:
            if door.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.3)
    raise SystemExit("the page has not started")


if __name__ == "__main__":
    main()
