"""A sheet as one self-contained HTML fragment for notebooks: no script, no network.

Colours come from the page (``inherit``, ``currentColor``), so light and dark themes both read well, whatever the system prefers.
"""

from __future__ import annotations

from html import escape

from dyngran.compiler.report_sheet import Sheet, Table

STYLE = """
.dyngran {font: 13px/1.45 system-ui, sans-serif; color: inherit; background: transparent}
.dyngran table {border-collapse: collapse; margin: 0.2em 0 1em}
.dyngran caption {text-align: left; font-weight: 600; padding: 0.3em 0}
.dyngran th, .dyngran td {padding: 0.15em 0.8em 0.15em 0; text-align: left; vertical-align: top; white-space: pre-wrap}
.dyngran th {font-weight: 500; opacity: 0.75; border-bottom: 1px solid color-mix(in srgb, currentColor 35%, transparent)}
.dyngran td {border-bottom: 1px solid color-mix(in srgb, currentColor 12%, transparent)}
.dyngran .r {text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap}
.dyngran h4 {margin: 0.3em 0} .dyngran p {margin: 0.2em 0} .dyngran ul {margin: 0.2em 0; padding-left: 1.2em}
"""


def render_html(sheet: Sheet) -> str:
    """One ``<div>`` with its own style sheet; every text is escaped."""
    parts = [f"<h4>{escape(sheet.heading)}</h4>", *(f"<p>{escape(sentence)}</p>" for sentence in sheet.sentences)]
    parts += [_html_table(table) for table in sheet.tables]
    if sheet.notes:
        parts.append("<ul>" + "".join(f"<li>{escape(note)}</li>" for note in sheet.notes) + "</ul>")
    return f'<div class="dyngran"><style>{STYLE}</style>' + "\n".join(parts) + "</div>"


def _html_table(table: Table) -> str:
    def line(cells: tuple[str, ...], tag: str) -> str:
        drawn = (f"<{tag}{' class=r' if side == 'r' else ''}>{escape(cell)}</{tag}>" for cell, side in zip(cells, table.align, strict=True))
        return f"<tr>{''.join(drawn)}</tr>"

    body = "".join(line(row, "td") for row in table.rows)
    return f"<table><caption>{escape(table.title)}</caption><thead>{line(table.columns, 'th')}</thead><tbody>{body}</tbody></table>"
