"""The command line: one thin file per command, each with one function of the command's name."""
