"""`python -m xformer` is the command line."""

import sys

from xformer.cli import main

sys.exit(main())
