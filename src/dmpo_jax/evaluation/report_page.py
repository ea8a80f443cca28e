"""The page that reports stand in: its head, its style sheet, and what it may do."""

import html

# Even if text escaped its quoting, the page may run and request nothing.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"

_LIGHT = """
  --page: #ffffff; --ink: #1d2125; --soft: #5a6470; --line: #d5dae0; --raised: #f5f7f9; --grid: #e3e7eb;
  --good: #11663a; --good-fill: #e3f4e9; --bad: #a3191f; --bad-fill: #fce8e7; --note: #fff4d6;
  --series-0: #0b62a4; --series-1: #c2410c; --series-2: #0f766e;
  --series-3: #7c3aed; --series-4: #8a6100; --series-5: #be185d;
"""
_DARK = """
  --page: #14171a; --ink: #e6e9ec; --soft: #a3adb8; --line: #394149; --raised: #1d2226; --grid: #2d343a;
  --good: #7fd6a2; --good-fill: #15352a; --bad: #ff9d98; --bad-fill: #45201f; --note: #3b3212;
  --series-0: #6cb6ff; --series-1: #ff9f5a; --series-2: #4fd1c5;
  --series-3: #c4a1ff; --series-4: #e3b341; --series-5: #f687b3;
"""

_CSS = (
    f":root {{ color-scheme: light dark; {_LIGHT} }}"
    f"@media (prefers-color-scheme: dark) {{ :root {{ {_DARK} }} }}"
    f"@media print {{ :root {{ color-scheme: light; {_LIGHT} }} }}"
    """
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1rem 4rem; max-width: 68rem; background: var(--page);
  color: var(--ink); font: 16px/1.55 system-ui, "Segoe UI", Roboto, "Liberation Sans", sans-serif; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 .5rem; overflow-wrap: anywhere; }
h2 { font-size: 1.25rem; margin: 2.5rem 0 .6rem; padding-top: .6rem; border-top: 1px solid var(--line); }
h3 { font-size: 1rem; margin: 0 0 .4rem; overflow-wrap: anywhere; }
h4 { font-size: .9rem; margin: 0 0 .3rem; }
p, li { max-width: 46rem; overflow-wrap: anywhere; }
ul { padding-left: 1.2rem; }
.verdict { font-size: 1.1rem; }
.small { font-size: .85rem; color: var(--soft); font-weight: normal; margin: .2rem 0; }
.missing { background: var(--note); border: 1px solid var(--line); border-radius: .4rem; padding: .7rem 1rem;
  margin: 1.2rem 0; }
.missing h2 { border: 0; margin: 0; padding: 0; font-size: 1rem; }
.missing ul { margin: .3rem 0 0; }
.scroll { overflow-x: auto; }
table.numbers { border-collapse: collapse; font-variant-numeric: tabular-nums; min-width: 100%; }
table.numbers th, table.numbers td { padding: .35rem .7rem; border-bottom: 1px solid var(--line);
  text-align: right; white-space: nowrap; }
table.numbers th:first-child, table.numbers td:first-child { text-align: left; white-space: normal;
  overflow-wrap: anywhere; min-width: 7rem; }
table.numbers thead th { border-bottom: 2px solid var(--soft); font-size: .85rem; }
table.numbers .small { display: block; }
table.numbers tr.baseline td { color: var(--soft); }
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; padding: 0; margin: .4rem 0; list-style: none; }
.legend svg { width: 2.4rem; height: .6rem; margin-right: .4rem; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 22rem), 1fr));
  gap: 1.4rem; }
figure { margin: 0; min-width: 0; break-inside: avoid; }
figcaption { font-weight: 600; overflow-wrap: anywhere; }
figure svg { display: block; width: 100%; height: auto; }
figure svg text { font-family: inherit !important; }
svg * { stroke-linejoin: round; stroke-linecap: butt; }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 20rem), 1fr)); gap: 1rem; }
.card { border: 1px solid var(--line); border-radius: .4rem; padding: .8rem; min-width: 0;
  break-inside: avoid; }
.answers { display: flex; flex-wrap: wrap; gap: 1rem 1.6rem; }
.answer { min-width: 0; max-width: 100%; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: var(--raised); padding: .5rem .7rem;
  border-radius: .3rem; font-size: .82rem; line-height: 1.45; margin: 0 0 .4rem; max-height: 22rem;
  overflow: auto; unicode-bidi: isolate; }
code { overflow-wrap: anywhere; unicode-bidi: isolate; }
.odd { border: 1px dotted var(--soft); border-radius: .2rem; padding: 0 .15em; font-family: monospace; }
table.grid { border-collapse: collapse; border: 2px solid var(--ink); }
table.grid td { position: relative; width: 2.2rem; height: 2.2rem; padding: 0; text-align: center;
  border: 1px solid var(--line); }
table.grid td:nth-child(2) { border-right: 2px solid var(--ink); }
table.grid tr:nth-child(2) td { border-bottom: 2px solid var(--ink); }
td.clue { background: var(--raised); }
td.right { background: var(--good-fill); color: var(--good); }
td.wrong { background: var(--bad-fill); color: var(--bad);
  outline: 2px dashed var(--bad); outline-offset: -2px; }
.wrong .mark { top: 3px; right: 4px; font-size: .75rem; }
.mark { position: absolute; top: 1px; right: 3px; font-size: .6rem; line-height: 1; font-weight: bold; }
details { margin: .5rem 0; }
summary { cursor: pointer; overflow-wrap: anywhere; }
@media (max-width: 40rem) {
  table.numbers { font-size: .82rem; }
  table.numbers th, table.numbers td { padding: .3rem .3rem; }
  table.numbers thead th, table.numbers .small { font-size: .72rem; white-space: normal; }
  table.numbers td:first-child, table.numbers th:first-child { min-width: 4.5rem; }
}
@media print { body { max-width: none; padding: 0; font-size: 12px; } pre { max-height: none; }
  td, tr, .missing { print-color-adjust: exact; -webkit-print-color-adjust: exact; } }
"""
)


def document(title: str, parts: list[str], css: str = "") -> str:
    """A whole HTML document with a title and parts that are already quoted, empty ones left out; `css` adds to the style."""
    body = "\n".join(part for part in parts if part)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n<link rel="icon" href="data:,">\n'
        f"<title>{html.escape(title)}</title>\n<style>{_CSS}{css}</style>\n</head>\n<body>\n<main>\n"
        f"{body}\n</main>\n</body>\n</html>\n"
    )
