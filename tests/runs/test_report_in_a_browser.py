"""report.html as Chromium shows it, which is the system's; without one the test is skipped."""

import html
import json
import re
import shutil
import subprocess

import pytest

import runs
from conftest import LIMIT
from reports import HOSTILE, a_run, page_of

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
FLAGS = runs.words(
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync "
    "--disable-background-networking --disable-component-update"
)

LOOK = """
addEventListener("load", () => {
  const found = [...document.querySelectorAll("iframe")].map(frame => {
    const page = frame.contentDocument, root = page.documentElement
    page.querySelectorAll("details").forEach(part => part.open = true)
    const style = part => frame.contentWindow.getComputedStyle(page.querySelector(part))
    return {
      inner: frame.contentWindow.innerWidth, scroll: root.scrollWidth, hit: !!window.hit,
      pictures: [...page.images].filter(picture => picture.naturalWidth).length,
      back: style("body").backgroundColor, ink: style("body").color, height: root.scrollHeight,
      scripts: page.scripts.length, alone: page.querySelectorAll("h1").length,
    }
  })
  document.body.innerHTML = "<pre id=found>" + JSON.stringify(found) + "</pre>"
})
"""


def light_of(color):
    return sum(map(int, re.findall(r"\d+", color)[:3])) / 3


@pytest.mark.skipif(not CHROMIUM, reason="no chromium; apt-get install chromium")
@pytest.mark.parametrize("texts", [["why?"], [*HOSTILE.values()]], ids=["tame", "hostile"])
def test_it_fits_400_and_1600_pixels_light_and_dark(texts, tmp_path):
    """In frames of that size; a frame is as dark as its frame's color-scheme."""
    page = html.escape(page_of(a_run(tmp_path / "run", texts, device=texts[-1])))
    frame = '<iframe srcdoc="{}" style="width:{}px;height:900px;border:0;color-scheme:{}"></iframe>'
    looks = [(width, scheme) for width in (400, 1600) for scheme in ("light", "dark")]
    frames = "".join(frame.format(page, *look) for look in looks)
    wrapper = f"<!doctype html><meta charset=utf-8><body>{frames}<script>{LOOK}</script>"
    (tmp_path / "wrapper.html").write_text(wrapper)
    place = f"--user-data-dir={tmp_path}/profile", "--window-size=1700,1000"
    command = [CHROMIUM, *FLAGS, *place, "--dump-dom", f"file://{tmp_path}/wrapper.html"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    told = re.search("<pre id=.found.>(.*)</pre>", done.stdout)
    assert told, done.stderr
    for (width, scheme), seen in zip(looks, json.loads(told[1]), strict=True):
        assert seen["inner"] == width and seen["scroll"] <= width, (scheme, seen)
        assert (seen["pictures"], seen["scripts"], seen["alone"], seen["hit"]) == (3, 0, 1, False)
        back, ink = light_of(seen["back"]), light_of(seen["ink"])
        assert (back < 60 and ink > 200) if scheme == "dark" else (back > 200 and ink < 60)
