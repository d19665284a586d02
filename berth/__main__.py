"""`python -m berth`."""

from berth.cli.main import main

main()
