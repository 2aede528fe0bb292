"""The OpenAI-compatible server: schema (what comes in), errors, render (what goes out), one file per endpoint family.

app puts them together; server binds the port and runs until a signal.
"""

from lockstep.serve.api.app import create_app
from lockstep.serve.api.server import bind, serve

__all__ = ["bind", "create_app", "serve"]
