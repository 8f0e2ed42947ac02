"""How a notebook shows a result: a title, facts and a table; whatever they hold is escaped."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import pandas as pd

MOST_ROWS = 20


def largest(table: pd.DataFrame, column: str) -> pd.DataFrame:
    """Return the rows in order of the size of a column's values, the largest first."""
    return table.sort_values(column, key=abs, ascending=False)


def titled_table(
    title: str, table: pd.DataFrame | None = None, detail: str = "", facts: Sequence[str] = ()
) -> str:
    """Return HTML: title and detail, a list of facts, and a table, cut in the middle if long.

    Tokens such as `</script>` in any of them show as they are written.
    """
    head = f"<p><b>{escape(title)}</b>{': ' if detail else ''}{escape(detail)}</p>"
    items = "".join(f"<li>{escape(fact)}</li>" for fact in facts)
    rows = ""
    if table is not None:
        rows = table.to_html(
            max_rows=MOST_ROWS,
            show_dimensions=len(table) > MOST_ROWS,
            float_format="{:.4g}".format,
            na_rep="–",
            notebook=True,
        )
    return head + (f"<ul>{items}</ul>" if items else "") + rows
