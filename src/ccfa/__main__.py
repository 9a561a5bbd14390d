"""`python -m ccfa` is the command line."""

from ccfa.cli import main

main()
