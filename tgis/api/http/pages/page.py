"""A page of HTML: one file in one look, whose policy lets a browser run and load nothing but what the file has."""

import hashlib
from base64 import b64encode
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path

from aiohttp import web

NO_STORE = {"Cache-Control": "no-store"}
_STYLE = Path(__file__).with_name("page.css").read_text(encoding="utf-8")  # of all pages
_POLICY = "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"


@dataclass(frozen=True, slots=True)
class Page:
    """Ready to be sent."""

    text: str
    policy: str

    def response(self, headers: Mapping[str, str] = NO_STORE) -> web.Response:
        headers = {
            **headers,
            "Content-Security-Policy": self.policy,
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
        }
        return web.Response(text=self.text, content_type="text/html", headers=headers)


def make_page(title: str, body: str, style: str = "", script: str = "") -> Page:
    """`body` is HTML; with a script, the page may send requests to this server."""
    style, policy = _STYLE + style, _POLICY
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    head += f"<title>{escape(title)}</title><style>{style}</style>"
    policy += f"; style-src {_source(style)}"
    if script:
        head += f'<script type="module">{script}</script>'
        policy += f"; script-src {_source(script)}; connect-src 'self'"
    return Page(f'<!doctype html>\n<html lang="en"><head>{head}</head><body>{body}</body></html>\n', policy)


def table(names: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Cells are HTML; it scrolls sideways where it is too wide."""
    head = "".join(f"<th>{name}" for name in names)
    body = "".join(f"<tr><td>{'<td>'.join(row)}" for row in rows)
    return f'<div class="wide" tabindex="0"><table><tr>{head}{body}</table></div>'


def _source(text: str) -> str:
    return f"'sha256-{b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
