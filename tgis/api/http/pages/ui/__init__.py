"""`/ui`: a page to try the model, with the probability of each token and of its candidates."""

from pathlib import Path

from tgis.api.http.pages.page import Page, make_page

_SCRIPTS = ("requests.js", "answer.js", "card.js", "main.js")  # one script, in which each uses those before


def render_page() -> Page:
    script = "".join(map(_read, _SCRIPTS))
    return make_page("tgis", _read("page.html"), _read("page.css"), script)


def _read(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")
