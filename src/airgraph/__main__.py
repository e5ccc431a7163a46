"""`python -m airgraph`"""

import sys

from airgraph.tools.cli import main

sys.exit(main())
