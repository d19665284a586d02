"""`python -m berth.chaos`."""

import sys

from berth.chaos.run import main

sys.exit(main())
