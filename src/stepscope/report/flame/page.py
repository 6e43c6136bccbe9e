"""The interactive page of a flame graph: one file that loads nothing and runs only the scripts it was made with.

The Content-Security-Policy names scripts and styles by their hashes, so that nothing a recorded name contains could run
even if it got into the page. d3 and d3-flame-graph are vendored, unmodified; their licences are named in the page.
"""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from importlib import resources

from stepscope.model.sampled import FlameGraph
from stepscope.report.escape import markup
from stepscope.report.flame.document import document, embedded

MAX_BYTES = 3_000_000
SCRIPTS = ("vendor/d3.min.js", "vendor/d3-flamegraph.umd.min.js", "page.js")
_LICENCES = (
    "<!-- Holds d3 7.9.0 (ISC, Copyright 2010-2023 Mike Bostock) and d3-flame-graph 5.0.0 (Apache-2.0,"
    " Copyright Martin Spier), unmodified. -->"
)
# the style sheet that d3-flame-graph adds to the page by itself
_OWN_STYLE = re.compile(r"\.textContent=`([^`]*)`")
_BODY = """<body>
<header>
<h1>{title}</h1>
{notes}
</header>
<div class="bar">
<select id="tree" aria-label="tree" hidden></select>
<select id="side" aria-label="widths" hidden></select>
<input id="search" type="search" placeholder="search: function, file.py:42, regular expression" aria-label="search"
 spellcheck="false" autocomplete="off">
<span id="found" class="soft" aria-live="polite"></span>
<button id="reset" type="button">reset</button>
<button id="icicle" type="button" aria-pressed="true">icicle</button>
<button id="flame" type="button" aria-pressed="false">flame</button>
<button id="copy" type="button">copy place</button>
<span id="copied" class="soft" aria-live="polite"></span>
<button id="theme" type="button">light / dark</button>
</div>
<p class="soft"><span id="source"></span><span id="hidden"></span></p>
<div id="legend" class="legend"></div>
<div id="current" aria-live="polite"></div>
<div id="chart" tabindex="0"></div>
<div id="tip"></div>
<p class="soft">Click a box to zoom. Keys: <kbd>/</kbd> search, arrows and <kbd>Enter</kbd> walk and zoom,
 <kbd>Esc</kbd> resets, <kbd>t</kbd> next tree, <kbd>i</kbd> icicle or flame, <kbd>c</kbd> copy the place,
 <kbd>d</kbd> dark.</p>
<noscript><p>This picture is drawn by a script of the page; a browser that runs none cannot show it.</p></noscript>
"""


def render(graph: FlameGraph, *, first: str | None = None) -> str:
    """The whole page. `first`: key of the tree that is shown first."""
    title = markup(graph.title, 160)
    notes = "".join(f"<li>{markup(note)}</li>" for note in graph.notes)
    listed = (
        f'<details class="notes" open><summary>Before you read it</summary><ul>{notes}</ul></details>' if notes else ""
    )
    scripts = "".join(f"<script>{asset(name)}</script>\n" for name in SCRIPTS)
    return (
        "<!doctype html>\n"
        f'<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_policy()}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="referrer" content="no-referrer">\n'
        f"<title>{title} – stepscope flame graph</title>\n{_LICENCES}\n"
        f"<style>{asset('page.css')}</style>\n</head>\n"
        f"{_BODY.format(title=title, notes=listed)}"
        f'<script type="application/json" id="data">{embedded(document(graph, first=first))}</script>\n'
        f"{scripts}</body>\n</html>\n"
    )


@cache
def asset(name: str) -> str:
    """The text of a file beside this module."""
    return (resources.files(__package__) / "assets" / name).read_text(encoding="utf-8")


@cache
def _policy() -> str:
    scripts = " ".join(_hash(asset(name)) for name in SCRIPTS)
    styles = [asset("page.css"), *_OWN_STYLE.findall(asset("vendor/d3-flamegraph.umd.min.js"))]
    return (
        f"default-src 'none'; script-src {scripts}; style-src {' '.join(map(_hash, styles))}; "
        "base-uri 'none'; form-action 'none'"
    )


def _hash(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")
    return f"'sha256-{digest}'"
