"""The report of results: tables, figures, sentences and the page. Cells are text; no number originates here."""
