"""The frame of report.html: its style sheet and the skeleton that the parts are put into.

One file, no script, no address to fetch anything from: it can be mailed, archived and opened in ten years. The same
variables colour page and figures, for light and dark screens; print uses the light ones.
"""

from __future__ import annotations

from collections.abc import Mapping

from compress.report.style import DARK, LIGHT

_PAGE = {"light": {"page": "#f4f6f8", "line": "#d5dbe2"}, "dark": {"page": "#0d1117", "line": "#2c3440"}}


def _variables(colours: Mapping[str, str]) -> str:
    return " ".join(f"--{name}: {value};" for name, value in colours.items())


STYLE = (
    f"""
:root {{ color-scheme: light dark; {_variables(LIGHT)} {_variables(_PAGE["light"])} }}
@media screen and (prefers-color-scheme: dark) {{ :root {{ {_variables(DARK)} {_variables(_PAGE["dark"])} }} }}
"""
    + """
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; text-size-adjust: 100%; }
body { margin: 0; background: var(--page); color: var(--ink); font: 16px/1.55 system-ui, -apple-system, "Segoe UI",
  Roboto, "Noto Sans", "Liberation Sans", Arial, sans-serif; overflow-wrap: break-word; }
main, header, footer { max-width: 62rem; margin: 0 auto; padding: 0 1.25rem; }
header { padding-top: 2.5rem; }
h1 { font-size: 1.05rem; margin: 0; font-weight: 700; letter-spacing: .01em; }
h1 span { font-weight: 400; color: var(--muted); }
.headline { font-size: clamp(1.3rem, 1rem + 1.6vw, 1.9rem); line-height: 1.3; font-weight: 650; margin: .6rem 0 1.4rem;
  letter-spacing: -.01em; text-wrap: pretty; max-width: none; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(11rem, 1fr)); gap: .75rem; margin: 0 0 1.5rem;
  padding: 0; list-style: none; max-width: none; }
.tiles li { background: var(--paper); border: 1px solid var(--line); border-radius: .6rem; padding: .8rem 1rem; }
.tiles b { display: block; font-size: 1.75rem; line-height: 1.2; font-variant-numeric: tabular-nums; }
.tiles span { color: var(--muted); font-size: .85rem; line-height: 1.35; display: block; }
nav { font-size: .85rem; margin: 0 0 .5rem; }
nav a { display: inline-block; margin: 0 1rem .3rem 0; }
a { color: var(--blue); text-underline-offset: .15em; }
section { background: var(--paper); border: 1px solid var(--line); border-radius: .6rem; padding: 1.25rem 1.4rem;
  margin: 0 0 1.1rem; }
h2 { font-size: 1.2rem; line-height: 1.3; margin: 0 0 .8rem; }
h3 { font-size: 1rem; margin: 0 0 .5rem; }
p { margin: 0 0 .8rem; max-width: 46rem; }
ul { margin: 0 0 .9rem; padding-left: 1.2rem; max-width: 46rem; }
.note, figcaption { color: var(--muted); font-size: .9rem; }
figure { margin: 1.5rem 0 .6rem; }
figcaption { max-width: 46rem; margin-top: .4rem; }
figure svg { display: block; width: 100%; height: auto; }
figure svg path, figure svg use { stroke-linejoin: round; stroke-linecap: butt; }
figure svg text { font-family: "DejaVu Sans", Verdana, system-ui, sans-serif; }
.narrow { display: none; max-width: 27rem; }
.scroll { overflow-x: auto; margin: 0 0 .9rem; -webkit-overflow-scrolling: touch; }
.scroll:focus-visible { outline: 2px solid var(--blue); outline-offset: 2px; }
table { border-collapse: collapse; font-size: .9rem; line-height: 1.4; font-variant-numeric: tabular-nums;
  min-width: min(100%, 30rem); }
th, td { padding: .32rem .7rem; text-align: left; border-bottom: 1px solid var(--grid); vertical-align: top; }
thead th { color: var(--muted); font-weight: 600; font-size: .8rem; white-space: nowrap;
  border-bottom-color: var(--line); }
th:first-child, td:first-child { padding-left: 0; }
table.grouped { width: 100%; }
.none { color: var(--muted); }
.num { text-align: right; white-space: nowrap; }
tbody th { padding-top: .9rem; font-weight: 700; }
tr:last-child td { border-bottom-color: var(--line); }
code, pre { font: .84em/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; }
pre { overflow-x: auto; margin: 0; padding: .9rem 1rem; background: var(--page); border-radius: .4rem; }
details { margin: .6rem 0; }
summary { cursor: pointer; color: var(--blue); font-size: .9rem; padding: .25rem 0; }
details .scroll { max-height: 34rem; overflow-y: auto; }
details thead th { position: sticky; top: 0; background: var(--paper); }
footer { color: var(--muted); font-size: .85rem; padding-bottom: 2.5rem; }
@media (max-width: 640px) {
  body { font-size: 15px; }
  main, header, footer { padding-left: .8rem; padding-right: .8rem; }
  header { padding-top: 1.4rem; }
  section { padding: 1rem .9rem; }
  .tiles { grid-template-columns: 1fr 1fr; }
  .tiles li { padding: .65rem .75rem; }
  .tiles b { font-size: 1.4rem; }
  .tiles span { font-size: .78rem; }
  nav { display: none; }
  table { font-size: .82rem; }
  th, td { padding: .3rem .5rem; }
  .wide { display: none; }
  .narrow { display: block; }
}
@media print {
  @page { margin: 14mm 13mm; }
  :root { --page: #ffffff; --paper: #ffffff; }
  body { font-size: 9.5pt; line-height: 1.45; }
  table { font-size: 8.5pt; }
  th, td { padding: .16rem .5rem; }
  tbody th { padding-top: .45rem; }
  figure { margin: 4mm 0 2mm; }
  main, header, footer { max-width: none; padding-left: 0; padding-right: 0; }
  header { padding-top: 0; }
  section { border: 0; padding: 0; margin: 0 0 7mm; }
  nav, footer { display: none; }
  .wide { display: block; }
  .narrow { display: none; }
  h2, h3 { break-after: avoid; }
  figure, tr, .grouped tbody, .tiles li { break-inside: avoid; }
  thead { display: table-header-group; }
  .scroll { overflow: visible; }
  details .scroll { max-height: none; overflow: visible; }
  pre { white-space: pre-wrap; border: 1px solid var(--line); }
  .headline { font-size: 16pt; }
  .tiles { grid-template-columns: repeat(4, 1fr); }
}
"""
)

SKELETON = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<header>
<h1>{title}{subtitle}</h1>
<p class="headline">{headline}</p>
{tiles}
<nav aria-label="Sections">{links}</nav>
</header>
<main>
{sections}
</main>
<footer><p>Written by compress from the files of the run folder.</p></footer>
</body>
</html>
"""
