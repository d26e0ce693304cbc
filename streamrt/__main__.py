"""`python -m streamrt`."""

from streamrt.cli import main

main()
