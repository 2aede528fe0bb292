"""What an engine's process runs first (`launch.py` starts it): see `child.py`."""

from __future__ import annotations

from lockstep.serve.lean import preload

if __name__ == "__main__":
    preload()
    from lockstep.serve.child import main

    main()
