"""The OpenAI-compatible server: schema (what comes in), errors, render (what goes out), one file per endpoint family.

app puts them together; server runs it until a signal.
"""

from lockstep.serve.api.app import create_app
from lockstep.serve.api.server import serve

__all__ = ["create_app", "serve"]
