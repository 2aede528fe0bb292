"""`python -m lockstep`: the command line."""

from lockstep.cli.app import main

if __name__ == "__main__":
    main()
