"""How the page looks, on light and on dark screens and on paper. Colours of caches are those of the plots."""

CSS = """
:root {
  color-scheme: light dark;
  --paper: #ffffff; --sheet: #f6f7f9; --text: #222834; --soft: #5d6675; --line: #d9dde4;
  --ours: #0072b2; --peer: #d55e00; --best: #e3f1fa; --alarm: #a3241f; --alarm-paper: #fdeeee;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #171b22; --sheet: #1e232c; --text: #e4e8ee; --soft: #9aa4b2; --line: #394150;
    --ours: #56b4e9; --peer: #e69f00; --best: #17354a; --alarm: #ff9b93; --alarm-paper: #3a1f20;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; max-width: 92rem; padding: 2.5rem 1.5rem 4rem; background: var(--paper); color: var(--text);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", "Liberation Sans", "DejaVu Sans", sans-serif;
}
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0 0 .3rem; overflow-wrap: anywhere; }
h2 { font-size: 1.25rem; margin: 3rem 0 .6rem; padding-bottom: .3rem; border-bottom: 1px solid var(--line); }
h3 { font-size: 1rem; margin: 0 0 .2rem; }
p { margin: .4rem 0; max-width: 46rem; }
.kind { color: var(--soft); font-size: .8rem; letter-spacing: .08em; text-transform: uppercase; margin: 0; }
.soft { color: var(--soft); font-size: .88rem; }
.alarm { background: var(--alarm-paper); color: var(--alarm); border-radius: 6px; padding: .5rem .8rem; }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(20rem, 1fr)); gap: .8rem; margin-top: 1.4rem; }
.card { background: var(--sheet); border: 1px solid var(--line); border-radius: 8px; padding: .8rem 1rem; }
.card b { display: block; font-size: 1.1rem; overflow-wrap: anywhere; }
.card .figure { font-variant-numeric: tabular-nums; }
.scroll { overflow-x: auto; margin: .8rem 0; }
table { border-collapse: collapse; width: 100%; font-size: .86rem; font-variant-numeric: tabular-nums; }
th, td { padding: .32rem .5rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line); }
th:first-child { text-align: left; position: sticky; left: 0; background: var(--paper); font-weight: inherit; }
thead th { color: var(--soft); font-weight: 600; vertical-align: bottom; white-space: normal; }
tbody tr:not(.class):hover > * { background: var(--sheet); }
tr.class th { padding-top: 1rem; color: var(--soft); font-size: .78rem; font-weight: 600; letter-spacing: .04em; }
td.best { font-weight: 700; background: var(--best); }
.dot { display: inline-block; width: .6em; height: .6em; margin-right: .5em; background: var(--text); }
.ours > .dot { background: var(--ours); border-radius: 50%; }
.peer > .dot { background: var(--peer); }
.mark {
  margin-left: .5em; padding: 0 .45em; border: 1px solid; border-radius: 1em; color: var(--alarm); font-size: .75rem;
}
.plots { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(40rem, 100%), 1fr)); gap: 1rem 2.5rem; }
figure { margin: 1.2rem 0; max-width: 62rem; }
figure img { display: block; width: 100%; height: auto; }
figcaption { margin-bottom: .6rem; }
figcaption p { color: var(--soft); font-size: .88rem; margin: 0; }
dl { display: grid; grid-template-columns: fit-content(65%) 1fr; gap: .3rem 1.2rem; font-size: .9rem; margin: .8rem 0; }
dt { font-weight: 600; overflow-wrap: anywhere; }
dd { margin: 0; overflow-wrap: anywhere; }
.pair {
  display: grid; max-width: 76rem; align-items: start; gap: 0 2.5rem;
  grid-template-columns: repeat(auto-fit, minmax(20rem, 1fr));
}
ul { padding-left: 1.2rem; }
li { margin: .25rem 0; overflow-wrap: anywhere; }
@media (max-width: 40rem) { dl { grid-template-columns: 1fr; } dd { margin: 0 0 .4rem 0; } }
@media print { body { max-width: none; padding: 0; } figure, .card { break-inside: avoid; } }
"""
