"""`python -m attnflow`."""

from .cli import main

main()
