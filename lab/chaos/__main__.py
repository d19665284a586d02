"""`python -m lab.chaos`."""

import sys

from lab.chaos.run import main

sys.exit(main())
