"""The web page at `/`: plain files of this package, which ask nothing of any other server."""

from __future__ import annotations

from pathlib import Path

from fastapi import FastAPI
from starlette.responses import Response

from lockstep.serve.api.errors import ApiError

_FOLDER = Path(__file__).parent / "web"
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
FILES = {f"/web/{file.name}": file for file in sorted(_FOLDER.iterdir()) if file.suffix in _TYPES}
PATHS = frozenset({"/", *FILES})
"""Asked for by a browser before its user could give a key; the page asks for the key itself."""
_HEADERS = {
    # The page runs its own scripts alone and talks to this server alone, whatever a model writes.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def add_page(app: FastAPI) -> None:
    """Serve the page's files."""

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return _file(_FOLDER / "index.html")

    @app.get("/web/{name}", include_in_schema=False)
    async def file(name: str) -> Response:
        found = FILES.get(f"/web/{name}")
        if found is None:
            raise ApiError(404, f"the page has no file {name!r}.")
        return _file(found)


def _file(path: Path) -> Response:
    return Response(path.read_bytes(), headers=_HEADERS, media_type=_TYPES[path.suffix])
