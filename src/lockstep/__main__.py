"""The command `lockstep`, and `python -m lockstep`."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line. An engine that it is certain to want is started before anything is imported for the rest:
    its process, which imports PyTorch, is what a server waits for."""
    engine = None
    if "serve" in sys.argv:
        from lockstep.serve.launch import launch_early

        engine = launch_early(sys.argv[1:])
    try:
        from lockstep.cli.app import main as run

        run(engine=engine)
    finally:
        if engine is not None:
            engine.end()


if __name__ == "__main__":
    main()
