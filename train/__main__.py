"""What `accelerate launch -m draftsmith.train` starts: see run.py."""

import sys

from draftsmith.train.run import main

sys.exit(main())
