"""Facts and findings → one `Report` → terminal, JSON and HTML. Computes no figure.

`document.build` makes the document, `document.report_bytes` its JSON; `outputs` writes files.
The renderers are imported where they are used, so that this package costs nothing at import.
"""
