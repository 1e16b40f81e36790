"""Looks at a page in headless Chromium: what its console says, what overlaps, what cannot be read."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape, unescape
from pathlib import Path
from typing import Any, Final

PROGRAMS: Final = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS: Final = (
    "--headless",
    "--no-sandbox",  # root's containers have no other way
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--enable-logging=stderr",
)
LIGHT, DARK = 1, 0
"""Values of Blink's setting preferredColorScheme."""
CONSOLE: Final = re.compile(r"CONSOLE[^\]]*\] (.*)")

HARNESS: Final = """<!doctype html><meta charset="utf-8"><body style="margin:0"><pre id="found"></pre>
<iframe id="page" srcdoc="{page}" style="border:0; height:4000px"></iframe>
<script>
function luminance(colour) {{
  const parts = colour.match(/[\\d.]+/g).slice(0, 3).map(Number).map(v => v / 255)
    .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2];
}}
function background(element, view) {{
  for (let each = element; each; each = each.parentElement) {{
    const colour = view.getComputedStyle(each).backgroundColor;
    if (!/rgba\\(.*, 0\\)|transparent/.test(colour)) return colour;
  }}
  return "rgb(255, 255, 255)";
}}
function contrast(one, other) {{
  const [a, b] = [luminance(one), luminance(other)];
  return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
}}
function looked(frame, width) {{
  frame.style.width = width + "px";
  const inside = frame.contentDocument, view = frame.contentWindow;
  const root = inside.documentElement, texts = [];
  const walker = inside.createTreeWalker(inside.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {{
    const node = walker.currentNode;
    if (!node.data.trim()) continue;
    const range = inside.createRange();
    range.selectNodeContents(node);
    const style = view.getComputedStyle(node.parentElement);
    for (const rect of range.getClientRects())
      if (rect.width)
        texts.push({{rect, style, text: node.data.trim().slice(0, 60), element: node.parentElement}});
  }}
  const overlaps = [], faint = [], outside = [];
  texts.forEach((one, index) => {{
    const ratio = contrast(one.style.color, background(one.element, view));
    if (ratio < 4.5) faint.push(one.text + ": " + ratio.toFixed(1));
    if (one.rect.left < -1 || one.rect.right > width + 1) outside.push(one.text);
    for (const other of texts.slice(index + 1)) {{
      const across = Math.min(one.rect.right, other.rect.right) - Math.max(one.rect.left, other.rect.left);
      const down = Math.min(one.rect.bottom, other.rect.bottom) - Math.max(one.rect.top, other.rect.top);
      if (across > 1 && down > 2) overlaps.push(one.text + " / " + other.text);
    }}
  }});
  const plot = inside.querySelector("figure svg"), box = plot.getBoundingClientRect();
  plot.dispatchEvent(new view.PointerEvent("pointermove", {{clientX: box.left + box.width / 2}}));
  const pointed = inside.querySelector("figcaption span").textContent;
  plot.dispatchEvent(new view.PointerEvent("pointerleave"));
  return {{width, pointed, overlaps, faint, outside, texts: texts.length,
    sideways: root.scrollWidth - root.clientWidth,
    dark: view.matchMedia("(prefers-color-scheme: dark)").matches,
    charts: [...inside.querySelectorAll(".curve")].map(each => each.getBoundingClientRect().width)}};
}}
addEventListener("load", () => {{
  const frame = document.getElementById("page");
  document.getElementById("found").textContent = JSON.stringify({widths}.map(width => looked(frame, width)));
}});
</script>"""


@dataclass(frozen=True, kw_only=True)
class Look:
    """What a browser makes of a page at one width."""

    width: int
    sideways: int
    """Pixels by which it can be scrolled sideways."""
    texts: int
    overlaps: list[str]
    faint: list[str]
    outside: list[str]
    dark: bool
    charts: list[float]
    pointed: str
    """What a pointer in the middle of the first chart makes its caption say."""


def chromium() -> str | None:
    return next(filter(None, map(shutil.which, PROGRAMS)), None)


def look(
    program: str, page: str, folder: Path, *, scheme: int, widths: Sequence[int]
) -> tuple[list[Look], list[str]]:
    """Returns what is seen at these widths, and the lines of the console."""
    harness = folder / "harness.html"
    harness.write_text(HARNESS.format(page=escape(page), widths=json.dumps(list(widths))))
    words = [f"--user-data-dir={folder / 'profile'}", f"--blink-settings=preferredColorScheme={scheme}"]
    done = subprocess.run(
        [program, *FLAGS, *words, "--dump-dom", harness.as_uri()], capture_output=True, text=True, timeout=120
    )
    found = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.S)
    assert found and found[1], done.stderr
    looks: list[dict[str, Any]] = json.loads(unescape(found[1]))
    return [Look(**each) for each in looks], CONSOLE.findall(done.stderr)
