"""The style sheet of pages without scripts: readable in light and dark, on paper, and without colour."""

from __future__ import annotations

# Colours of the parts of a step by position; neighbours differ in lightness too, both themes keep 3:1 to the page.
PART_COLOURS = ("#c2410c", "#2563eb", "#0d9488", "#9333ea", "#a16207", "#be185d", "#64748b")

STYLE = """
:root { color-scheme: light dark; --page: #ffffff; --text: #1c2430; --soft: #566072; --line: #d9dee7; --box:
  #f5f7fa; --accent: #1d4ed8; --critical: #b42318; --warning: #8a5a00; --info: #1d4ed8; --good: #1a7f37; }
@media (prefers-color-scheme: dark) { :root { --page: #12161c; --text: #e4e8ee; --soft: #9aa6b6; --line: #2d3540;
  --box: #1a2028; --accent: #8ab4f8; --critical: #ff8a80; --warning: #f2c063; --info: #8ab4f8; --good: #6fdc8c; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 72rem; padding: 2rem 1.25rem 4rem; background: var(--page); color: var(--text);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
h1 { font-size: 1.5rem; margin: 0; }
h2 { font-size: 1.1rem; margin: 2.25rem 0 .6rem; }
h3 { font-size: 1rem; margin: 0; }
p { margin: .3rem 0; }
code, pre, .number { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; font-size: .87em; }
.soft { color: var(--soft); }
.figures { display: flex; flex-wrap: wrap; gap: .5rem 2rem; margin: 1rem 0 .2rem; padding: 0; }
.figures div { min-width: 6rem; }
.figures dt { color: var(--soft); font-size: .85rem; }
.figures dd { margin: 0; font-size: 1.35rem; font-weight: 600; font-variant-numeric: tabular-nums; }
svg { display: block; width: 100%; height: auto; }
svg text { fill: var(--soft); font: 12px system-ui, sans-serif; }
.swatch { display: inline-block; width: .8em; height: .8em; border-radius: 2px; margin-right: .5em; }
.finding { border: 1px solid var(--line); border-left-width: 5px; border-radius: 6px; padding: .9rem 1.1rem; margin:
  .9rem 0; }
.finding.explained { margin-left: 1.6rem; }
.finding.critical { border-left-color: var(--critical); }
.finding.warning { border-left-color: var(--warning); }
.finding.info { border-left-color: var(--info); }
.finding header { display: flex; flex-wrap: wrap; gap: .2rem .8rem; align-items: baseline; }
h3 { margin: .25rem 0 .5rem; }
.finding .cost { margin-left: auto; font-weight: 600; font-variant-numeric: tabular-nums; }
.severity { text-transform: uppercase; font-size: .75rem; font-weight: 700; letter-spacing: .04em; }
.critical .severity { color: var(--critical); }
.warning .severity { color: var(--warning); }
.info .severity { color: var(--info); }
.healthy { color: var(--good); font-weight: 600; }
.unexplained { color: var(--warning); font-weight: 600; }
pre { background: var(--box); border-radius: 5px; padding: .5rem 0; margin: .4rem 0; overflow-x: auto; }
pre span { display: block; padding: 0 .8rem; white-space: pre; }
pre .hit { background: color-mix(in srgb, var(--warning) 18%, transparent); font-weight: 600; }
.finding dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1rem; margin: .5rem 0 0; }
.finding dt { color: var(--soft); }
.finding dd { margin: 0; overflow-wrap: anywhere; }
.finding ul { margin: 0; padding-left: 1.1rem; }
.intervals { margin: .8rem 0 .2rem; }
.intervals .zero { stroke: var(--soft); stroke-dasharray: 5 4; }
.intervals .name { fill: var(--text); }
.intervals .bar { fill: var(--soft); opacity: .45; }
.intervals .dot { fill: var(--text); opacity: .7; }
.intervals .tick { stroke: var(--text); stroke-width: 2.5; }
.intervals .ceiling { fill: none; stroke: var(--accent); stroke-width: 1.5; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; }
caption { text-align: left; color: var(--soft); padding: .2rem 0 .4rem; }
th, td { text-align: left; padding: .3rem .8rem .3rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
th { font-weight: 600; white-space: nowrap; }
.right { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
details { border-top: 1px solid var(--line); padding: .6rem 0; }
summary { cursor: pointer; font-weight: 600; }
summary:focus-visible { outline: 2px solid var(--accent); outline-offset: 2px; }
td code { white-space: pre-wrap; overflow-wrap: anywhere; display: block; min-width: 9rem; }
td.line code { white-space: nowrap; min-width: 0; }
a { color: var(--accent); }
@media print { body { max-width: none; } details > * { display: block; } }
"""
STYLE += "".join(f".part-{at} {{ background: {colour}; }}\n" for at, colour in enumerate(PART_COLOURS))
