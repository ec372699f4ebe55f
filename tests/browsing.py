"""A real browser for the tests: pages after their scripts ran, and a person who labels."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

DRIVER = """
<script>
const truth = %s;
while (!document.getElementById("task").hidden) {
  const file = data.items[shown].file, wanted = truth[file];
  if (wanted === "?") { document.dispatchEvent(new KeyboardEvent("keydown", { key: "0" })); continue; }
  const answers = [...document.getElementById("answers").children];
  const fits = answers.find((each) => each.firstChild.textContent === data.classes[wanted]);
  if (fits) { fits.click(); continue; }
  document.getElementById("search").value = data.classes[wanted].slice(0, 3);
  document.getElementById("search").dispatchEvent(new Event("input"));
  document.querySelector("#found button").click();
}
const before = csv();
undo();
const reopened = !document.getElementById("task").hidden;
document.body.append(Object.assign(document.createElement("pre"), { id: "out",
  textContent: JSON.stringify({ csv: before, reopened, asked: given.length + 1, verdict: verdict(state()) }) }));
</script></body>
"""


def chromium() -> str:
    """The browser's path; without one the test is skipped by hand, but fails where CI is set."""
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None:
        reason = "no Chromium on this machine; install it, on Debian with: apt-get install chromium"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    return found


def browse(path: Path, profile: Path, *more: str) -> tuple[str, str]:
    """The page as the browser has it after its scripts ran, and what it logged."""
    flags = (
        "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
        "--disable-component-update --disable-sync --disable-dev-shm-usage --enable-logging=stderr --v=0 "
        "--virtual-time-budget=20000 --window-size=1280,2000 --dump-dom"
    )
    command = [chromium(), *flags.split(), *more, f"--user-data-dir={profile}", path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout, done.stderr


def browse_labels(page: Path, truth: dict[str, int | str], tmp_path: Path) -> dict[str, object]:
    """Label a page in the browser by these true classes, until it stops asking."""
    path = tmp_path / "driven.html"
    path.write_text(page.read_text().replace("</body>", DRIVER % json.dumps(truth)))
    dom, log = browse(path, tmp_path / "profile")
    assert [line for line in log.splitlines() if "CONSOLE" in line] == []
    (found,) = re.findall(r'<pre id="out">(.*?)</pre>', dom, re.DOTALL)
    return json.loads(found.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))
