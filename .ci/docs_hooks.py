"""For ``mkdocs build``: what docstrings write in reStructuredText and Markdown has no word for."""

import re

_ROLE = re.compile(r":(?:class|func|meth|attr|data|mod|exc):<code>~?([\w.]+)</code>")


def on_page_content(html: str, **_: object) -> str:
    """Show names that are marked as ``:class:`X``` as code, and no ``::`` before examples."""
    html = _ROLE.sub(lambda found: f"<code>{found[1].removeprefix('telemetry.')}</code>", html)
    return html.replace("<p>::</p>", "").replace("::</p>", ":</p>")
